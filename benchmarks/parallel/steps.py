"""Whole steps of the executor that the options build, with its other ranks as its children: from plan to result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import types_pb2
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan_wire.reading import plan_from_wire
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.config import ExecutorConfig
from executor_svc.startup.build import build_model
from executor_svc.worker.step import StepExecutor
from executor_svc.worker.step_ranks import StepRanks

_WARM_UP = 3
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Steps:
    """Prompts of one step, and the steps of one token each after it."""

    sequences: int
    prompt: int
    decodes: int


class TimedAgreement:
    """Implements `StepRanks` by another one's: counts the time to agree on a plan, without that to apply it."""

    def __init__(self, ranks: StepRanks) -> None:
        self._ranks = ranks
        self.samples = ranks.samples
        self.taken_s: list[float] = []

    def agreed(self, plan: StepPlan, slots: Slots, apply: Callable[[], Scheduled]) -> Scheduled:
        """As in `StepRanks`."""
        applying = 0.0

        def timed() -> Scheduled:
            nonlocal applying
            began = time.perf_counter()
            try:
                return apply()
            finally:
                applying = time.perf_counter() - began

        began = time.perf_counter()
        scheduled = self._ranks.agreed(plan, slots, timed)
        self.taken_s.append(time.perf_counter() - began - applying)
        return scheduled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)


def step_times(_rank: int, _size: int, options: dict[str, Any], steps: Steps, repeats: int) -> list[dict[str, Any]]:
    """Return the milliseconds of a prefill step and of decode steps, and microseconds to agree; for `on_processes`.

    options: of the executor, with its number of ranks. Each repeat begins a session.
    """
    executor, _ = build_model(ExecutorConfig(**options))
    assert isinstance(executor, StepExecutor)
    timed = TimedAgreement(executor._ranks)
    executor._ranks = timed
    return [_session(executor, timed, steps) for _ in range(repeats)]


def _session(executor: StepExecutor, timed: TimedAgreement, steps: Steps) -> dict[str, Any]:
    executor.clear()
    prefills: list[float] = []
    decodes: list[float] = []
    tokens: list[list[int]] = []
    timed.taken_s.clear()
    for message in _plans(steps, executor.limits.vocab_size):
        plan = plan_from_wire(message)
        began = time.perf_counter()
        result = executor.execute(plan, 0)
        (decodes if message.decode_ready else prefills).append((time.perf_counter() - began) * 1e3)
        tokens.append(list(result.token_ids))
        assert len(result.token_ids) == steps.sequences
    return {
        "prefill_ms": prefills[-1],
        "decode_ms": median(decodes[_WARM_UP:]),
        "agree_us": median(timed.taken_s[_WARM_UP:]) * 1e6,
        "tokens": tokens,
    }


def _plans(steps: Steps, vocab: int) -> Iterator[pb.StepPlan]:
    """Yield the prompts twice, so that the second finds all compiled, and the decodes."""
    each = -(-(steps.prompt + steps.decodes + 1) // BLOCK_SIZE)
    slots = range(steps.sequences)
    for step_id in (1, 2):
        admitted = [
            pb.AdmittedSequence(
                slot=slot,
                token_ids=[300 + (7 * slot + 11 * position) % (vocab - 300) for position in range(steps.prompt)],
                num_prompt_tokens=steps.prompt,
                block_tables=[pb.BlockTable(block_ids=range(slot * each, (slot + 1) * each))],
                sampling=types_pb2.SequenceSampling(),
            )
            for slot in slots
        ]
        scheduled = pb.ScheduledTokens(
            slots=slots, num_tokens=[steps.prompt] * steps.sequences, samples=[True] * steps.sequences
        )
        released = slots if step_id == 2 else ()
        yield pb.StepPlan(step_id=step_id, epoch=1, released_slots=released, admitted=admitted, scheduled=scheduled)
    for step_id in range(3, 3 + steps.decodes):
        yield pb.StepPlan(step_id=step_id, epoch=1, decode_ready=True)
