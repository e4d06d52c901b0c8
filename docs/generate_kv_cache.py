"""Makes the drawings of docs/kv-cache.md from runs of the core: `python docs/generate_kv_cache.py [--check]`.

A drawing has a character for each page of the device pool, by what it holds.
"""

from __future__ import annotations

from pathlib import Path

from scheduler_runs import Run, fenced, grid, lane_spec, name_of, write_page

from scheduler_svc.core.kv_groups import KVGroup
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.types import ExecutorSpec
from tests.helpers.core.page_letters import page_letters

TARGET = Path(__file__).with_name("kv-cache.md")
_Requests = list[tuple[str, list[int], int]]
"""Name, prompt and number of tokens to generate."""


def windows() -> str:
    """One sequence that grows beyond its window."""
    return _drawn(lane_spec(14, kv_groups=(KVGroup(0), KVGroup(1, window=6))), [("A", [*range(1, 15)], 24)], every=6)


def snapshots() -> str:
    """A prefix that is cut: the second request saves where the third finds it."""
    common = [*range(1, 14)]
    requests = [("A", [*common, *range(20, 29)], 3), ("B", [*common, 40, 41], 3), ("C", [*common, 50], 3)]
    return _drawn(lane_spec(24, kv_groups=(KVGroup(0),), pages_per_state=2, max_num_batched_tokens=32), requests)


def _drawn(spec: ExecutorSpec, requests: _Requests, every: int = 1) -> str:
    """Run requests one after the other; a row for each admission, and for one in so many other steps."""
    run = Run(Policies(prefix_caching=True), spec)
    rows: list[list[object]] = [["step", "computes", "found", "saves at", "pages"]]
    number = 0
    while run.core.groups or requests:
        if not run.core.groups:
            run.add(*requests.pop(0))
        number += 1
        step = run.step()
        found = [f"{name_of(each)}: {each.num_hit_tokens} of {each.num_tokens}" for each in step.joined]
        saves = [str(position) for position in step.plan.state_saves.positions]
        if found or saves or number % every == 0:
            row = [_computes(step), " ".join(found), " ".join(saves)]
            rows.append([number, *(cell or "-" for cell in row), page_letters(run.lane)])
        run.apply(step)
    return fenced(grid([*rows, ["end", "", "", "", page_letters(run.lane)]]))


def _computes(step: PlannedStep) -> str:
    chunks = [f"{name_of(each.sequence)}: {each.num_tokens}" for each in step.chunks if each.num_tokens]
    return " ".join(chunks) or "1 token"


if __name__ == "__main__":
    write_page(TARGET, {"windows": windows, "snapshots": snapshots})
