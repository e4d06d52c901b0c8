"""What a step record says of a sequence, for pictures of the schedule: pure functions of StepRecords."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from cadenza.v1 import admin_pb2, execution_pb2


class Cell(IntEnum):
    """The state of one sequence in one step; if steps share a column, the largest is shown."""

    ABSENT = 0
    WAITING = 1  # not yet admitted, or preempted
    IDLE = 2  # in the batch, but not computed in this step
    UNUSED = 3  # computed after its end, because the step was planned before the end was known; dropped
    DECODE = 4
    SEVERAL = 5  # decode with accepted drafts: several tokens in one step
    PREFILL = 6  # prompt tokens, or recompute after preemption


def ran(records: Sequence[admin_pb2.StepRecord]) -> list[admin_pb2.StepRecord]:
    """The records of steps that computed something, in order: by the time of the plan, since each executor counts its
    steps from 1."""
    done = [r for r in records if r.status == execution_pb2.STEP_STATUS_OK and any(r.num_tokens)]
    return sorted(done, key=lambda record: (record.planned_ns, record.executor_index, record.step_id))


def computed_cell(record: admin_pb2.StepRecord, index: int, num_prompt_tokens: int) -> Cell:
    """The state of the sequence at `index` of a record that computed tokens for it."""
    if record.context_lens[index] < num_prompt_tokens or record.num_tokens[index] > 1:
        return Cell.PREFILL
    num_sampled = record.num_sampled[index]
    return Cell.SEVERAL if num_sampled > 1 else Cell.DECODE if num_sampled else Cell.UNUSED
