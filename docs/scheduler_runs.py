"""Runs of the core over the simulated executor, plain-text tables, and pages with drawings of both."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cadenza_common.plan.plan import BlockMoves
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.simulated.costs import StepCosts
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.types import ExecutorSpec, RequestSpec
from tests.helpers.core.core_executor import COSTS, CoreExecutor

VOCAB_SIZE = 97
_GREEDY = SequenceSampling()


class Run:
    """A core with one lane, its executor and one plan in flight, run step by step."""

    def __init__(
        self, policies: Policies, spec: ExecutorSpec, costs: StepCosts = COSTS, vocab_size: int = VOCAB_SIZE
    ) -> None:
        self.core = Scheduler(policies)
        self.core.add_executor(0, spec)
        self._executor = CoreExecutor(spec, vocab_size, costs)
        self.now = 0.0

    @property
    def lane(self) -> Lane:
        """The executor's lane."""
        return self.core.lanes[0]

    def add(self, name: str, prompt: Iterable[int], max_tokens: int | None, **more: object) -> None:
        """Add a request, greedy unless `more` sets other fields of its spec."""
        spec = {"sampling": _GREEDY, "max_tokens": max_tokens, **more}
        self.core.add_request(RequestSpec(name, tuple(prompt), **spec), self.now)  # type: ignore[arg-type]

    def plan(self) -> PlannedStep | None:
        """Plan a step; None if it would be empty."""
        if self.core.plan_step(0, self.now) is None:
            return None
        return self.lane.inflight[-1]

    def step(self) -> PlannedStep:
        """Plan a step that is not empty, and check the core's integrity; raises InvariantError."""
        step = self.plan()
        if step is None:
            raise InvariantError("the run ended too early")
        self.core.check_integrity()
        return step

    def apply(self, step: PlannedStep, seconds: float = 1.0) -> None:
        """Run a step on the executor and apply the result."""
        result = self._executor.run(step.plan)
        self.now += seconds
        self.core.apply_result(0, result, self.now)
        self.core.take_outputs()


def lane_spec(num_blocks: int, block_size: int = 4, **more: int) -> ExecutorSpec:
    """Limits of a small executor, in tokens, blocks and sequences; `more` overrides these."""
    limits = {"num_slots": 8, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, **more}
    return ExecutorSpec(block_size=block_size, num_blocks=num_blocks, watermark=0.0, **limits)  # type: ignore[arg-type]


def name_of(sequence: Sequence) -> str:
    """A for a request's only sequence; A0, A1 and so on for several."""
    group = sequence.group
    return group.spec.request_id + (str(sequence.sample_index) if len(group.sequences) > 1 else "")


def grid(rows: Iterable[Iterable[object]]) -> str:
    """Rows as aligned columns, two spaces apart."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)


def fenced(*grids: str) -> str:
    """A fenced Markdown block with these grids, separated by empty lines."""
    return "```text\n" + "\n\n".join(grids) + "\n```"


def pairs_text(moves: BlockMoves) -> str:
    """Block moves as text."""
    return " ".join(f"{source}→{destination}" for source, destination in moves) or "-"


def table(rows: list[list[str]]) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n" + "\n".join([head, "|" + "---|" * len(rows[0]), *body]) + "\n"


def write_page(target: Path, drawings: Mapping[str, Callable[[], str]]) -> None:
    """Write a page with new drawings; with --check, compare it only.

    A drawing is between `<!-- begin NAME -->` and `<!-- end NAME -->`. Raises SystemExit if the page lacks the place of
    a drawing, or is out of date.
    """
    before = page = target.read_text(encoding="utf-8")
    for name, draw in drawings.items():
        place = re.compile(rf"<!-- begin {name} -->\n(.*?)<!-- end {name} -->", re.S)
        if (count := len(place.findall(page))) != 1:
            raise SystemExit(f"{target} has {count} places for the drawing {name}")
        head, _, rest = place.split(page)
        page = f"{head}<!-- begin {name} -->\n{draw()}\n<!-- end {name} -->{rest}"
    if sys.argv[1:] != ["--check"]:
        target.write_text(page, encoding="utf-8")
    elif before != page:
        raise SystemExit(f"{target} is out of date: make docs")
