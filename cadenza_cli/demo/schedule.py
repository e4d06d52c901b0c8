"""The schedule that ran, from step records: the sequences computed in each step, and statistics.

Pure functions of StepRecords; `schedule_picture` draws what these return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cadenza.steps.cells import Cell, computed_cell, ran
from cadenza.v1 import admin_pb2

_DECODED = (Cell.DECODE, Cell.SEVERAL)
_COMPUTED = (*_DECODED, Cell.PREFILL)


@dataclass(slots=True)
class SequenceRow:
    """One sequence over all steps."""

    sequence_id: int
    label: str
    num_prompt_tokens: int
    num_output_tokens: int = 0
    cells: list[Cell] = field(default_factory=list)  # one per step


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rows in the order of joining; columns are steps."""

    rows: list[SequenceRow]
    step_ids: list[int]
    occupancy: list[int]  # sequences computed in each step


@dataclass(frozen=True, slots=True)
class ScheduleStats:
    """Statistics of step records; shares are 0 to 1, and 0 (not NaN) if nothing was measured."""

    num_steps: int
    duration_s: float  # from the first plan to the last result
    num_prefill_tokens: int
    num_output_tokens: int
    mean_occupancy: float  # sequences per step
    max_occupancy: int
    num_unused: int  # computed sequence-steps whose token was dropped
    num_preemptions: int
    mean_used_blocks: float
    peak_used_blocks: int
    num_blocks: int
    waste: float  # share of slots in held blocks without a token: internal fragmentation
    num_static_steps: int  # steps that static batches of the same sequences would have taken
    num_drafts: int = 0  # of speculative decoding, that were checked
    num_accepted_drafts: int = 0
    tokens_per_step: float = 0.0  # that a decoding sequence got, unless it was dropped

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second over the whole run."""
        return self.num_output_tokens / self.duration_s if self.duration_s > 0 else 0.0


def executor_indices(records: Sequence[admin_pb2.StepRecord]) -> list[int]:
    """The indices of the executors that ran a step."""
    return sorted({record.executor_index for record in ran(records)})


def build_schedule(
    records: Sequence[admin_pb2.StepRecord], labels: Mapping[str, str], executor_index: int | None = None
) -> Schedule:
    """The schedule of all sequences in `records`; `labels` are by request id, which replaces a missing label.

    `executor_index`: of the steps of this executor, and of the sequences that they compute; None: of all steps.
    """
    joined = {join.sequence_id: join for record in records for join in record.joined}
    left = {leave.sequence_id: leave.num_output_tokens for record in records for leave in record.left}
    steps = [step for step in ran(records) if executor_index in (None, step.executor_index)]
    rows: dict[int, SequenceRow] = {}
    for record in steps:
        for sequence_id in record.sequence_ids:
            if sequence_id not in rows:
                rows[sequence_id] = _new_row(sequence_id, joined.get(sequence_id), labels, left)
    for row in rows.values():
        row.cells = _cells(row, steps)
    occupancy = [sum(1 for count in record.num_tokens if count) for record in steps]
    return Schedule(list(rows.values()), [record.step_id for record in steps], occupancy)


def summarize(records: Sequence[admin_pb2.StepRecord], *, block_size: int, batch_size: int) -> ScheduleStats:
    """Compute the statistics of a run; `batch_size` is that of the static batches for comparison."""
    steps = ran(records)
    schedule = build_schedule(records, {})
    held = sum(record.load.num_used_blocks for record in steps) * block_size
    stored = sum(record.load.num_stored_tokens for record in steps)
    prompts = {join.sequence_id: join.num_prompt_tokens for record in records for join in record.joined}
    count = max(1, len(steps))
    return ScheduleStats(
        num_steps=len(steps),
        duration_s=(max(r.applied_ns for r in steps) - min(r.planned_ns for r in steps)) / 1e9 if steps else 0.0,
        num_prefill_tokens=sum(prompts.values()),
        num_output_tokens=sum(leave.num_output_tokens for record in records for leave in record.left),
        mean_occupancy=sum(schedule.occupancy) / count,
        max_occupancy=max(schedule.occupancy, default=0),
        num_unused=sum(row.cells.count(Cell.UNUSED) for row in schedule.rows),
        num_preemptions=sum(len(record.preempted_ids) for record in records),
        mean_used_blocks=sum(record.load.num_used_blocks for record in steps) / count,
        peak_used_blocks=max((record.load.num_used_blocks for record in steps), default=0),
        num_blocks=max((record.load.num_blocks for record in steps), default=0),
        waste=max(0.0, 1.0 - stored / held) if held else 0.0,
        num_static_steps=_static_steps(schedule, batch_size),
        num_drafts=sum(map(sum, (record.num_drafts for record in steps))),
        num_accepted_drafts=sum(map(sum, (record.num_accepted_drafts for record in steps))),
        tokens_per_step=_tokens_per_step(schedule, steps),
    )


def _new_row(
    sequence_id: int, join: admin_pb2.SequenceJoined | None, labels: Mapping[str, str], left: Mapping[int, int]
) -> SequenceRow:
    num_output_tokens = left.get(sequence_id, 0)
    if join is None:  # it joined before the watch began, or that record was lost
        return SequenceRow(sequence_id, f"sequence {sequence_id}", 0, num_output_tokens)
    label = labels.get(join.request_id, join.request_id)
    if join.sample_index:
        label = f"{label} #{join.sample_index}"
    return SequenceRow(sequence_id, label, join.num_prompt_tokens, num_output_tokens)


def _cells(row: SequenceRow, steps: Sequence[admin_pb2.StepRecord]) -> list[Cell]:
    cells: list[Cell] = []
    resting = Cell.WAITING
    last = -1
    for column, record in enumerate(steps):
        if row.sequence_id in record.preempted_ids:
            resting = Cell.WAITING
        cell = _cell(row, record)
        if cell is None:
            cells.append(resting)
        else:
            cells.append(cell)
            resting, last = Cell.IDLE, column
    return cells[: last + 1] + [Cell.ABSENT] * (len(steps) - last - 1)


def _cell(row: SequenceRow, record: admin_pb2.StepRecord) -> Cell | None:
    for index, sequence_id in enumerate(record.sequence_ids):
        if sequence_id == row.sequence_id and record.num_tokens[index]:
            return computed_cell(record, index, row.num_prompt_tokens)
    return None


def _tokens_per_step(schedule: Schedule, steps: Sequence[admin_pb2.StepRecord]) -> float:
    """Tokens of a sequence in a step in which it decoded, on average; 0: none did."""
    cells = {row.sequence_id: row.cells for row in schedule.rows}
    counts = [
        num_sampled
        for column, record in enumerate(steps)
        for sequence_id, num_sampled in zip(record.sequence_ids, record.num_sampled, strict=True)
        if cells[sequence_id][column] in _DECODED
    ]
    return sum(counts) / len(counts) if counts else 0.0


def _static_steps(schedule: Schedule, batch_size: int) -> int:
    """Steps of static batches in the order of joining, each as long as its longest sequence's steps in this run."""
    lengths = [sum(cell in _COMPUTED for cell in row.cells) for row in schedule.rows]
    return sum(max(lengths[start : start + batch_size]) for start in range(0, len(lengths), batch_size))
