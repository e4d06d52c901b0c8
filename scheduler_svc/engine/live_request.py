"""A live request: its output so far, and its listener.

Readers keep an index into a sample's tokens; nothing is queued for them. A reader is notified of new output and builds
its message when its stream can take it, so a slow reader costs no memory and delays no other reader. One stream at a
time is attached to a request, as its listener.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

from cadenza_common.plan.result import LogprobColumns, TokenLogprobs
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.types import CUT_OFF, Finish, FinishDetail, RequestKey
from scheduler_svc.engine.request_trace import RequestTrace
from scheduler_svc.plan_loop.ports import EngineRequest, RequestCounts, RequestTimes, StopMatch, TextStream

Listener = Callable[["LiveRequest"], None]
_SERVICE_ERRORS = frozenset({FinishDetail.NON_FINITE_LOGITS, FinishDetail.EXECUTOR_ERROR})


class LiveSample:
    """The confirmed output of one sample."""

    __slots__ = ("cumulative_logprob", "finish", "hides_finish", "logprobs", "max_shown_tokens", "text", "token_ids")

    def __init__(self, text: TextStream | None) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0
        self.text = text
        self.finish: Finish | None = None
        self.max_shown_tokens: int | None = None
        """Maximum number of tokens that readers get for now: those that are durable in a journal; None: all."""
        self.hides_finish = False
        """Whether readers do not get the finish for now, because it is not durable yet."""

    @property
    def shown_finish(self) -> Finish | None:
        """The finish, as readers get it."""
        return None if self.hides_finish else self.finish

    def shown_ends(self) -> tuple[int, int]:
        """Number of tokens, and of characters of text, that readers get."""
        num_tokens = len(self.token_ids)
        if self.max_shown_tokens is not None:
            num_tokens = min(num_tokens, self.max_shown_tokens)
        if self.text is None:
            return num_tokens, 0
        num_chars = len(self.text.text)
        if num_tokens < len(self.token_ids) or self.hides_finish:
            # A finish releases text that was held back.
            num_chars = min(num_chars, self.text.text_ends[num_tokens - 1] if num_tokens else 0)
        return num_tokens, num_chars

    def append(self, token_id: int) -> StopMatch | None:
        """`extend` by a token and nothing else: the quick way for nearly every token of a step."""
        self.token_ids.append(token_id)
        if self.text is None:
            return None
        match = self.text.push((token_id,))
        if match is not None:
            self._truncate(match)
        return match

    def extend(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        finish: Finish | None = None,
        cumulative_logprob: float | None = None,
    ) -> StopMatch | None:
        """Add new tokens, a finish, or both; a beam's cumulative logprob comes with its finish.

        Returns the match of a stop string that they complete, if any; tokens after the match are removed.
        """
        self.token_ids.extend(token_ids)
        if logprobs:
            self.logprobs.extend(logprobs)
            self.cumulative_logprob += sum(entry.logprob for entry in logprobs)
        if cumulative_logprob is not None:
            self.cumulative_logprob = cumulative_logprob
        match = None
        if self.text is not None and token_ids:
            by_token = finish is not None and finish.detail in (FinishDetail.EOS, FinishDetail.STOP_TOKEN)
            match = self.text.push(token_ids, ends_with_stop_token=by_token)
        if match is not None:
            self._truncate(match)
        elif finish is not None:
            self._end(finish)
        return match

    def _truncate(self, match: StopMatch) -> None:
        for entry in self.logprobs[match.num_tokens :]:
            self.cumulative_logprob -= entry.logprob
        del self.token_ids[match.num_tokens :]
        del self.logprobs[match.num_tokens :]
        self._end(Finish(FinishDetail.STOP_STRING, stop_string=match.stop_string))

    def _end(self, finish: Finish) -> None:
        self.finish = finish
        if self.text is not None:
            self.text.finish()


class LivePromptLogprobs:
    """The known logprobs of a prompt, in compact columns; the first prompt token has none."""

    __slots__ = ("_logprobs", "_ranks", "_top_logprobs", "_top_token_ids", "num_top")

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._logprobs = array("f")
        self._ranks = array("I")
        self._top_token_ids = array("I")
        self._top_logprobs = array("f")

    @property
    def end(self) -> int:
        """Index after the last prompt token whose logprob is known; 1 while none is."""
        return 1 + len(self._logprobs)

    def extend(self, new: LogprobColumns) -> None:
        """Append the rows of the next prompt tokens."""
        self._logprobs.extend(new.logprobs)
        self._ranks.extend(new.ranks)
        self._top_token_ids.extend(new.top_token_ids)
        self._top_logprobs.extend(new.top_logprobs)

    def rows(self, start: int, end: int) -> LogprobColumns:
        """The rows of the prompt tokens `start` to `end - 1`; `start` is at least 1."""
        known = LogprobColumns(1, self._logprobs, self._ranks, self.num_top, self._top_token_ids, self._top_logprobs)
        return known.rows(start, end)


class LiveRequest:
    """A request with its samples, times and listener."""

    __slots__ = (
        "adapter_hash",
        "catches_up",
        "counts",
        "ended",
        "error",
        "executor_id",
        "had_stream",
        "hidden",
        "listener",
        "prompt_logprobs",
        "request",
        "returned",
        "samples",
        "shows_later",
        "times",
        "trace",
    )

    def __init__(self, request: EngineRequest, arrival_ns: int) -> None:
        self.request = request
        self.times = RequestTimes(arrival_ns=arrival_ns)
        self.counts = RequestCounts()
        self.adapter_hash = b""
        """The content of its adapter, known once it is part of a step; empty: none."""
        self.ended = False
        self.executor_id: int | None = None
        """The executor that runs it, or ran it last; None: none has in this process."""
        self.error: Exception | None = None
        """Why it ended without a finish of every sample; readers raise it after the output so far."""
        self.trace: RequestTrace | None = None
        """Its trace; None: it is not traced."""
        self.hidden = False
        """Whether readers get nothing for now, because its admission is not durable yet."""
        self.shows_later = False
        """Whether readers get no new output before it is durable in a journal, which then calls the listener."""
        make_text = request.make_text
        self.samples = [LiveSample(make_text() if make_text else None) for _ in range(request.spec.num_samples)]
        self.returned = self.samples if request.best_of is None else []
        """The samples that readers get, by index; with best_of, none before all have finished."""
        num_top = request.spec.sampling.num_prompt_logprobs
        self.prompt_logprobs = LivePromptLogprobs(num_top) if num_top is not None else None
        self.listener: Listener | None = None
        """Of the attached stream; changed by `subscribe` and `unsubscribe`."""
        self.had_stream = False
        """Whether a stream has ever been attached."""
        self.catches_up = False
        """Set for a request that a restarted scheduler computes again: its clients may have more output than it has."""

    @property
    def request_id(self) -> str:
        """The client's request id."""
        return self.request.spec.request_id

    @property
    def num_returned(self) -> int:
        """Number of samples that readers get in the end."""
        best_of = self.request.best_of
        return len(self.samples) if best_of is None else best_of.num_returned

    def cumulative_logprob(self, sample_index: int) -> float | None:
        """Cumulative logprob of a returned sample; None without logprobs, or for a beam search's empty result."""
        spec, sample = self.request.spec, self.returned[sample_index]
        known = spec.sampling.num_logprobs is not None if spec.beams is None else bool(sample.token_ids)
        return sample.cumulative_logprob if known else None

    @property
    def num_completion_tokens(self) -> int:
        """Number of output tokens over all samples, including samples that are not returned."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def failed(self) -> bool:
        """Whether it ended with an error of the service, as opposed to one of its own."""
        return self.error is not None or any(
            sample.finish is not None and sample.finish.detail in _SERVICE_ERRORS for sample in self.samples
        )

    @property
    def detail(self) -> FinishDetail | None:
        """How it ended: the finish of the sample that ended worst; None if it failed without one."""
        if self.error is not None:
            return None
        return max((sample.finish.detail for sample in self.samples if sample.finish is not None), default=None)

    @property
    def has_finishes(self) -> bool:
        """Whether a sample that readers get has finished."""
        return any(sample.finish is not None for sample in self.returned)

    def finish_if_all_ended(self) -> bool:
        """Whether all samples have finished; with best_of, also chooses the returned ones."""
        for sample in self.samples:
            if sample.finish is None:
                return False
        best_of = self.request.best_of
        if best_of is not None and not self.returned:
            # The sort is stable: among equals, the first drawn goes first.
            self.returned = sorted(self.samples, key=_rank)[: best_of.num_returned]
            if not best_of.returns_logprobs:
                for sample in self.returned:
                    sample.logprobs = []
        return True

    def subscribe(self, listener: Listener) -> None:
        """Call `listener(self)` whenever there is new output; it must not block.

        It replaces the present listener, which is called a last time to learn that.
        """
        replaced, self.listener = self.listener, listener
        self.had_stream = True
        if replaced is not None:
            replaced(self)

    def unsubscribe(self, listener: Listener) -> bool:
        """Stop calling a listener; returns False if another one has replaced it."""
        if self.listener is not listener:
            return False
        self.listener = None
        return True

    @property
    def has_listener(self) -> bool:
        """Whether a stream is attached."""
        return self.listener is not None

    def notify(self) -> None:
        """Call the listener."""
        if self.listener is not None:
            self.listener(self)


def record_planned(
    step: PlannedStep, lives: Mapping[RequestKey, LiveRequest], now_ns: int
) -> tuple[list[LiveRequest], list[LiveRequest]]:
    """Record times, executors and preemption counts of a step's requests.

    Returns the requests whose first step this is, and the requests that have moved from another executor.
    """
    started, moved = [], []
    for sequence in step.joined:
        live = lives.get(sequence.group.key)
        if live is None:
            continue
        if not live.times.first_plan_ns:
            live.times.first_plan_ns = now_ns
            live.adapter_hash = sequence.group.adapter_hash
            # The first sample to join computes the prompt for all samples.
            live.counts.num_cached_tokens = sequence.num_hit_tokens
            started.append(live)
        if live.executor_id != step.plan.executor_id:
            if live.executor_id is not None:
                moved.append(live)
            live.executor_id = step.plan.executor_id
    for sequence in step.preempted:
        live = lives.get(sequence.group.key)
        if live is not None:
            live.counts.num_preemptions = sequence.group.num_preemptions
    return started, moved


def _rank(sample: LiveSample) -> tuple[bool, float]:
    """Sort key of best_of: smaller is better. A sample that was cut off ranks below all that finished."""
    return sample.finish is None or sample.finish.detail in CUT_OFF, -sample.cumulative_logprob
