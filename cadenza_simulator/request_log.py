"""The log of a run's requests: what clients would have seen, and the service's own times."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.requests import RequestShape
from cadenza_simulator.lanes import TOKEN, InflightStep, SimulatedLane
from cadenza_simulator.rows import RequestRows, gaps_between
from cadenza_simulator.traffic import NO_TOKENS, DueRequest, Traffic
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.types import FinishDetail, RequestKey

_FAILURES = frozenset({FinishDetail.ABORTED, FinishDetail.DEADLINE, FinishDetail.EXECUTOR_ERROR})


class Watch(Protocol):
    """May end a run early."""

    def ended(
        self, shape: RequestShape, due_s: float, first_s: float, last_s: float, num_output_tokens: int, error: str
    ) -> bool:
        """Take a request that has ended, with its times (NaN: not reached); returns whether the run is to end now."""


class _LiveRequest:
    """A request that is being served."""

    __slots__ = ("arrived", "due_s", "first", "num_cached", "num_prompt", "planned", "prompt", "shape", "spans")

    def __init__(self, request: DueRequest, arrived: float, num_prompt: int, prompt: tuple[int, ...]) -> None:
        self.shape = request.shape
        self.due_s = request.due_s
        self.arrived = arrived
        self.planned = math.nan
        self.first = math.nan
        self.num_cached = 0
        self.num_prompt = num_prompt
        self.prompt = prompt
        """Kept only if another turn follows in the session."""
        self.spans: list[tuple[int, int, int, int]] = []
        """Ranges of steps that each gave a sample one token: sample, lane, first step, tokens that it had before."""


class RequestLog:
    """Records the requests of a run. Times are in seconds of virtual time."""

    def __init__(
        self, traffic: Traffic, lanes: Sequence[SimulatedLane], reply_s: float, *, keep_gaps: bool, watch: Watch | None
    ) -> None:
        self.stopped = False
        """Whether the watch has ended the run."""
        self._traffic = traffic
        self._lanes = lanes
        self._reply_s = reply_s
        self._keeps_gaps = keep_gaps
        self._watch = watch
        self._live: dict[RequestKey, _LiveRequest] = {}
        self._rows = RequestRows()

    def columns(self) -> RequestColumns:
        """All requests that have ended."""
        return self._rows.columns()

    def accept(self, key: RequestKey, request: DueRequest, now: float, prompt: tuple[int, ...]) -> None:
        """The scheduler accepted a request into its queue."""
        kept = prompt if self._traffic.has_next_turn(request.shape) else NO_TOKENS
        self._live[key] = _LiveRequest(request, now, len(prompt), kept)

    def refuse(self, request: DueRequest, now: float, error: str) -> None:
        """The scheduler refused a request; the later turns of its session are never sent."""
        shape = request.shape
        num_prompt_tokens = len(request.history) + shape.num_prompt_tokens
        self._rows.put(shape, num_prompt_tokens, due_s=request.due_s, sent_s=request.due_s, error=error)
        self._fail(shape, now + self._reply_s)
        if self._watch is not None:
            self.stopped |= self._watch.ended(shape, request.due_s, math.nan, math.nan, 0, error)

    def planned(self, step: PlannedStep, now: float) -> None:
        """A step was planned: the queue time of sequences that join for the first time ends now."""
        for sequence in step.joined:
            live = self._live.get(sequence.group.key)
            if live is not None and math.isnan(live.planned):
                live.planned = now
                live.num_cached = sequence.num_hit_tokens

    def started(self, lane: SimulatedLane, inflight_step: InflightStep, now: float) -> None:
        """A result was applied: it has the first tokens of some sequences, or their first since a preemption."""
        for sequence in inflight_step.starting:
            live = self._live.get(sequence.group.key)
            if live is None or sequence.is_beam:
                continue
            if math.isnan(live.first):
                live.first = now
            if self._keeps_gaps:
                before = sequence.num_output_tokens - 1
                live.spans.append((sequence.sample_index, lane.index, lane.num_applied - 1, before))

    def record_outputs(self, outputs: StepOutputs, now: float) -> None:
        """Close the requests that end with these outputs."""
        lengths: dict[SequenceGroup, int] = {}
        for beam in outputs.hypotheses:
            lengths[beam.group] = lengths.get(beam.group, 0) + len(beam.token_ids)
        for group, count in lengths.items():
            self._end(group, now, count, "")
        for sequence, finish in outputs.finishes.items():
            group = sequence.group
            if group.finished and group.key in self._live:
                count = sum(each.num_output_tokens for each in group.sequences)
                self._end(group, now, count, finish.detail.name if finish.detail in _FAILURES else "")

    def _end(self, group: SequenceGroup, now: float, num_output_tokens: int, error: str) -> None:
        live = self._live.pop(group.key)
        shape, reported_at = live.shape, now + self._reply_s
        first = now if group.beam_search is not None and num_output_tokens else live.first
        self._rows.put(
            shape,
            live.num_prompt,
            due_s=live.due_s,
            sent_s=live.due_s,
            first_s=first + self._reply_s,
            last_s=reported_at if num_output_tokens else math.nan,
            num_cached_tokens=live.num_cached,
            num_output_tokens=num_output_tokens,
            num_preemptions=group.num_preemptions,
            queue_s=live.planned - live.arrived,
            server_first_s=first - live.arrived,
            server_total_s=now - live.arrived,
            error=error,
            gaps=self._gaps(live, group) if self._keeps_gaps else None,
        )
        if error:
            self._fail(shape, reported_at)
        else:
            history = live.prompt + (TOKEN,) * group.sequences[0].num_output_tokens if live.prompt else NO_TOKENS
            self._traffic.ended(shape, reported_at, history)
        if self._watch is not None:
            first_s = first + self._reply_s
            self.stopped |= self._watch.ended(shape, live.due_s, first_s, reported_at, num_output_tokens, error)

    def _fail(self, shape: RequestShape, at_s: float) -> None:
        for skipped in self._traffic.failed(shape, at_s):
            self._rows.put(skipped, skipped.num_prompt_tokens, due_s=at_s, error="SKIPPED")

    def _gaps(self, live: _LiveRequest, group: SequenceGroup) -> npt.NDArray[np.float32]:
        """Times between the messages of a request: each step gives each of its running samples one token."""
        if len(live.spans) == 1:
            ((_, lane, start, _),) = live.spans
            run = self._lanes[lane].applied[start : start + group.sequences[0].num_output_tokens]
            return gaps_between(np.frombuffer(run, np.float64))
        steps: dict[int, set[int]] = {}
        for place, (sample, lane, start, num_before) in enumerate(live.spans):
            following = (span[3] for span in live.spans[place + 1 :] if span[0] == sample)
            count = next(following, group.sequences[sample].num_output_tokens) - num_before
            steps.setdefault(lane, set()).update(range(start, start + count))
        moments = array("d")
        for lane, places in steps.items():
            applied = self._lanes[lane].applied
            moments.extend(applied[place] for place in places)
        return gaps_between(np.sort(np.frombuffer(moments, np.float64)))
