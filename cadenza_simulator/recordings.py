"""Reads the work and the time of each step from a plan log, by replaying the log's calls.

A load test goes with a recording if both are of the same run of a server, by the facts that both hold.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, fields

import numpy as np

from cadenza.v1.planlog_pb2 import ApplyResultCall, PlanLogHeader, PlanLogRecord, PlanStepCall
from cadenza_common.serving.plan_log import PlanLogError, PlanLogReader
from cadenza_loadtest.requests import Floats, LoadTestError
from cadenza_loadtest.results.results import LoadTestFile
from cadenza_simulator.executor_profiles import ProfileLimits
from scheduler_svc.core.steps.results import context_lens
from scheduler_svc.plan_loop.pacing import StepPacer
from scheduler_svc.replay.core_replay import CoreReplay

_CLOCKS_S = 60.0
"""Allowed difference between the clocks of two machines."""


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """One row per step whose result was recorded; [n] each, counts are whole numbers."""

    planned_s: Floats
    """In seconds on the scheduler's clock; so is applied_s."""
    applied_s: Floats
    late_s: Floats
    """From when the plan was due (by the last result and by the pacer) until it was made; NaN if it waited for work."""
    tokens: Floats
    """Computed tokens; context_tokens, kv_tokens, samples and moved_blocks are also as in `StepWork`."""
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
class RecordedRun:
    """A plan log in the form that `fit` needs."""

    steps: RecordedSteps
    limits: ProfileLimits
    model: str
    device: str
    num_cut_bytes: int
    """Bytes of an incomplete last record."""
    started_unix_s: float = 0.0
    """When the recording began, on the scheduler's wall clock."""
    prompt_lens: tuple[int, ...] = ()
    """Prompt lengths of the accepted requests, in tokens."""


def read_recording(path: str) -> RecordedRun:
    """Read a plan log (`--record`); raises a LoadTestError that names the file.

    The scheduler's own replay reads it, because the meaning of a plan depends on all earlier plans.
    """
    try:
        with PlanLogReader(path) as reader:
            follower = _Follower(reader.header)
            for number, record in enumerate(reader, 1):
                found = follower.make(record)
                if found:
                    raise LoadTestError(
                        f"{path}: record {number}: this version's scheduler behaves differently from the recorded one "
                        f"({found[0]}): record it again"
                    )
            header, num_cut_bytes = reader.header, reader.num_cut_bytes
    except PlanLogError as error:
        raise LoadTestError(str(error)) from None
    if not follower.num_steps:
        raise LoadTestError(f"{path}: has no step with a result")
    return RecordedRun(
        follower.steps(),
        _limits(header),
        header.executor.model.name,
        header.executor.device,
        num_cut_bytes,
        header.started_unix_ns / 1e9,
        tuple(follower.prompt_lens),
    )


class _Follower(CoreReplay):
    """Replays the calls of a log and notes the work of each step."""

    def __init__(self, header: PlanLogHeader) -> None:
        super().__init__(header)
        self._numbers = array("d")
        self._pacers: defaultdict[int, StepPacer] = defaultdict(StepPacer)
        self._last_applied: defaultdict[int, float] = defaultdict(lambda: math.nan)
        self._late: dict[tuple[int, int], float] = {}
        """Seconds from when the plan was due, by executor and step id: each executor counts its own steps."""
        self.prompt_lens = array("q")

    @property
    def num_steps(self) -> int:
        """Number of steps so far."""
        return len(self._numbers) // len(fields(RecordedSteps))

    def steps(self) -> RecordedSteps:
        """All steps so far."""
        table = np.array(self._numbers).reshape(-1, len(fields(RecordedSteps)))
        return RecordedSteps(*(table[:, place].copy() for place in range(table.shape[1])))

    def make(self, record: PlanLogRecord) -> list[str]:
        """Replay the call of a record; returns the differences of its outcome from the recorded one."""
        kind = record.WhichOneof("record")
        if kind == "apply_result" and not record.error:
            self._note(record.apply_result)
        elif kind == "plan_step" and record.plan_step.HasField("plan"):
            self._note_plan(record.plan_step)
        elif kind == "add_request" and not record.error:
            self.prompt_lens.append(len(record.add_request.request.prompt_token_ids))
        elif kind == "executor_lost":
            self._last_applied.pop(record.executor_lost.executor_id, None)
        return super().make(record)

    def _note_plan(self, call: PlanStepCall) -> None:
        """Note how late the plan was. The plan loop's criteria: the newest result, and the pacer if a step runs."""
        lane, now = self._core.lanes[call.executor_id], call.now
        pacer, last_applied = self._pacers[call.executor_id], self._last_applied[call.executor_id]
        due = pacer.due(lane.inflight[0].total_tokens) if lane.inflight else 0.0
        waited = len(lane.inflight) > 1 or not len(lane.running)
        self._late[call.executor_id, call.plan.step_id] = math.nan if waited else now - max(last_applied, due)
        if not lane.inflight:
            pacer.started(now)

    def _note(self, call: ApplyResultCall) -> None:
        lane = self._core.lanes[call.executor_id]
        step, result, times = lane.inflight[0], call.result, call.result.timings
        contexts = context_lens(lane, step)
        chunks = {chunk.sequence: chunk.num_tokens for chunk in step.chunks}
        # A sequence that stopped on the executor computes nothing, although the plan names it.
        silent = {slot for slot, count in zip(result.slots, result.num_tokens, strict=False) if not count}
        tokens = context_tokens = kv_tokens = 0
        for sequence, context_len in contexts.items():
            count = chunks.get(sequence, 1)
            if not count or (sequence not in chunks and sequence.last_slot in silent):
                continue
            tokens += count
            context_tokens += count * context_len + count * (count + 1) // 2
            kv_tokens += count + context_len
        plan, pacer = step.plan, self._pacers[call.executor_id]
        late = self._late.pop((call.executor_id, plan.step_id), math.nan)
        num_moved = len(plan.swap_out) + len(plan.copies) + len(plan.swap_in)
        self._numbers.extend(
            (
                step.planned_at, call.now, late,
                tokens, context_tokens, kv_tokens, len(step.sampling_slots) - len(silent), num_moved,
                times.queue_ns, times.device_ns, times.sample_ns, times.moves_ns, times.total_ns,
            )
        )  # fmt: skip
        pacer.observe(step.total_tokens, times.total_ns / 1e9)
        pacer.started(call.now)
        self._last_applied[call.executor_id] = call.now


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


def check_compatible(recording: RecordedRun, file: LoadTestFile, path: str) -> None:
    """Raises LoadTestError if the first run of the result at `path` cannot be part of the recording.

    That is: its model or device differs, it began before the recording, or it has requests whose prompt lengths the
    recording lacks.

    A result that passes may still be of another recording: of the same server, later, with prompts of the same lengths.
    """
    mismatch = _mismatch(recording, file)
    if mismatch:
        raise LoadTestError(f"--loadtest {path}: does not match the recording: {mismatch}")


def _mismatch(recording: RecordedRun, file: LoadTestFile) -> str:
    server, run = file.server or {}, file.points[0].runs[0]
    model, devices = server.get("model"), [each.get("device") for each in server.get("executors", ())]
    if model is not None and model != recording.model:
        return f"its server had the model {model}, the recording has {recording.model}"
    if devices and recording.device not in devices:
        return f"its executors ran on {', '.join(map(str, devices))}, the recorded one on {recording.device}"
    if run.started_unix_s < recording.started_unix_s - _CLOCKS_S:
        return f"it began {recording.started_unix_s - run.started_unix_s:,.0f} s before the recording"
    sent = Counter(run.requests.num_prompt_tokens[run.requests.ok].tolist())
    missing = sent - Counter(recording.prompt_lens)
    if missing:
        return (
            f"{missing.total()} of its {sent.total()} completed requests are not in the recording, such as one with a "
            f"prompt of {next(iter(missing))} tokens"
        )
    return ""
