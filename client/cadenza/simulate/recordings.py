"""What the steps of a plan log did and how long each took: the log's calls are made again, and its times read."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, fields

import numpy as np

from cadenza.loadtest.requests import Floats, LoadTestError
from cadenza.plan_log import PlanLogError, PlanLogReader
from cadenza.simulate.executor_profiles import ProfileLimits
from cadenza.v1.planlog_pb2 import ApplyResultCall, PlanLogHeader, PlanLogRecord, PlanStepCall
from scheduler_svc.core.steps.results import context_lens
from scheduler_svc.engine.pacing import StepPacer
from scheduler_svc.replay.core_replay import CoreReplay


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """One row per step whose result was recorded; [n] each, counts as whole numbers."""

    planned_s: Floats
    """Seconds on the scheduler's clock, as are applied_s."""
    applied_s: Floats
    num_inflight: Floats
    """Plans in flight when its result came, its own included."""
    late_s: Floats
    """From when the plan was due (by the last result, and by the pacer) to its making; NaN where it waited for work."""
    tokens: Floats
    """Computed; so are context_tokens, kv_tokens, samples and moved_blocks as in `StepWork`."""
    context_tokens: Floats
    kv_tokens: Floats
    samples: Floats
    moved_blocks: Floats
    queue_ns: Floats
    device_ns: Floats
    sample_ns: Floats
    moves_ns: Floats
    total_ns: Floats

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Recording:
    """A plan log as `fit` wants it."""

    steps: RecordedSteps
    limits: ProfileLimits
    model: str
    device: str
    num_cut_bytes: int
    """Of a last record that was not written to its end."""
    started_unix_s: float = 0.0
    """When recording began, by the scheduler's wall clock."""
    prompt_lens: tuple[int, ...] = ()
    """In tokens, of the requests that were taken."""


def read_recording(path: str) -> Recording:
    """Read a plan log (`--record`); raises LoadTestError, which names the file.

    The scheduler's own replay goes through it: what a plan means follows from all plans before it.
    """
    try:
        with PlanLogReader(path) as reader:
            follower = _Follower(reader.header)
            for number, record in enumerate(reader, 1):
                found = follower.make(record)
                if found:
                    raise LoadTestError(
                        f"{path}: record {number}: this version's scheduler does otherwise than the one that was "
                        f"recorded ({found[0]}): record it again"
                    )
            header, num_cut_bytes = reader.header, reader.num_cut_bytes
    except PlanLogError as error:
        raise LoadTestError(str(error)) from None
    if not follower.num_steps:
        raise LoadTestError(f"{path}: holds no step with a result")
    return Recording(
        follower.steps(),
        _limits(header),
        header.executor.model.name,
        header.executor.device,
        num_cut_bytes,
        header.started_unix_ns / 1e9,
        tuple(follower.prompt_lens),
    )


class _Follower(CoreReplay):
    """Makes the calls of a log and notes what each step did."""

    def __init__(self, header: PlanLogHeader) -> None:
        super().__init__(header)
        self._numbers = array("d")
        self._pacer = StepPacer()
        self._last_applied = math.nan
        self._late: dict[int, float] = {}
        """By step id: seconds from when the plan was due."""
        self.prompt_lens = array("q")

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return len(self._numbers) // len(fields(RecordedSteps))

    def steps(self) -> RecordedSteps:
        """All of them."""
        table = np.array(self._numbers).reshape(-1, len(fields(RecordedSteps)))
        return RecordedSteps(*(table[:, place].copy() for place in range(table.shape[1])))

    def make(self, record: PlanLogRecord) -> list[str]:
        """Make the call of a record again; returns what its outcome differs in from the recorded one."""
        kind = record.WhichOneof("record")
        if kind == "apply_result" and not record.error:
            self._note(record.apply_result)
        elif kind == "plan_step" and record.plan_step.HasField("plan"):
            self._note_plan(record.plan_step)
        elif kind == "add_request" and not record.error:
            self.prompt_lens.append(len(record.add_request.request.prompt_token_ids))
        elif kind == "executor_lost":
            self._last_applied = math.nan
        return super().make(record)

    def _note_plan(self, call: PlanStepCall) -> None:
        """How late it was, by what the plan loop goes by: the newest result, and the pacer where a step runs."""
        lane, now = self._core.lanes[call.executor_id], call.now
        due = self._pacer.due(lane.inflight[0].total_tokens) if lane.inflight else 0.0
        waited = len(lane.inflight) > 1 or not len(lane.running)
        self._late[call.plan.step_id] = math.nan if waited else now - max(self._last_applied, due)
        if not lane.inflight:
            self._pacer.started(now)

    def _note(self, call: ApplyResultCall) -> None:
        lane = self._core.lanes[call.executor_id]
        step, result, times = lane.inflight[0], call.result, call.result.timings
        contexts = context_lens(lane, step)
        chunks = {chunk.sequence: chunk.num_tokens for chunk in step.chunks}
        # What has stopped by itself computes nothing, whatever the plan says.
        silent = {slot for slot, count in zip(result.slots, result.num_tokens, strict=False) if not count}
        tokens = context_tokens = kv_tokens = 0
        for sequence, context_len in contexts.items():
            count = chunks.get(sequence, 1)
            if not count or (sequence not in chunks and sequence.last_slot in silent):
                continue
            tokens += count
            context_tokens += count * context_len + count * (count + 1) // 2
            kv_tokens += count + context_len
        plan = step.plan
        num_moved = len(plan.swapped_out) + len(plan.copied) + len(plan.swapped_in)
        self._numbers.extend(
            (
                step.planned_at, call.now, len(lane.inflight), self._late.pop(plan.step_id, math.nan),
                tokens, context_tokens, kv_tokens, len(step.sampling_slots) - len(silent), num_moved,
                times.queue_ns, times.device_ns, times.sample_ns, times.moves_ns, times.total_ns,
            )
        )  # fmt: skip
        self._pacer.observe(step.total_tokens, times.total_ns / 1e9)
        self._pacer.started(call.now)
        self._last_applied = call.now


def _limits(header: PlanLogHeader) -> ProfileLimits:
    executor = header.executor
    return ProfileLimits(
        block_size=executor.kv.block_size,
        num_blocks=executor.kv.num_device_blocks,
        num_host_blocks=executor.kv.num_host_blocks,
        max_num_seqs=executor.limits.max_num_seqs,
        max_num_batched_tokens=executor.limits.max_num_batched_tokens,
        max_model_len=executor.model.max_model_len,
        max_inflight_plans=executor.limits.max_inflight_plans,
    )
