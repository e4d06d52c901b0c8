"""A request while the service knows it: what it has produced so far, and who wants to hear of it.

Readers keep an index into a sample's own tokens; nothing is queued for them. A reader is woken when something is new
and builds its message when its stream can take it, so a slow one costs no memory and slows nobody.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.core.types import Finish, FinishDetail, SampleDelta, TokenLogprobs
from scheduler_svc.ports import EngineRequest, RequestCounts, RequestTimes, StopMatch, TextStream

Listener = Callable[["LiveRequest"], None]


class LiveSample:
    """One sample's confirmed output."""

    __slots__ = ("cumulative_logprob", "finish", "logprobs", "text", "token_ids")

    def __init__(self, text: TextStream | None) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0
        self.text = text
        self.finish: Finish | None = None

    def extend(self, delta: SampleDelta) -> StopMatch | None:
        """Take a delta in; returns the stop string it completes, if it does (the tokens after it are then cut)."""
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.cumulative_logprob += sum(entry.logprob for entry in delta.logprobs)
        match = self._push_text(delta)
        if match is not None:
            self._cut(match)
        elif delta.finish is not None:
            self._end(delta.finish)
        return match

    def _push_text(self, delta: SampleDelta) -> StopMatch | None:
        if self.text is None or not delta.token_ids:
            return None
        by_token = delta.finish is not None and delta.finish.detail in (FinishDetail.EOS, FinishDetail.STOP_TOKEN)
        return self.text.push(delta.token_ids, ends_with_stop_token=by_token)

    def _cut(self, match: StopMatch) -> None:
        for entry in self.logprobs[match.num_tokens :]:
            self.cumulative_logprob -= entry.logprob
        del self.token_ids[match.num_tokens :]
        del self.logprobs[match.num_tokens :]
        self._end(Finish(FinishDetail.STOP_STRING, stop_string=match.stop_string))

    def _end(self, finish: Finish) -> None:
        self.finish = finish
        if self.text is not None:
            self.text.finish()


class LiveRequest:
    """A request, its samples, its times, and its listeners."""

    __slots__ = ("_listeners", "counts", "ended", "request", "samples", "times")

    def __init__(self, request: EngineRequest, arrival_ns: int) -> None:
        self.request = request
        self.times = RequestTimes(arrival_ns=arrival_ns)
        self.counts = RequestCounts()
        self.ended = False
        make_text = request.make_text
        self.samples = [LiveSample(make_text() if make_text else None) for _ in range(request.spec.num_samples)]
        self._listeners: list[Listener] = []

    @property
    def request_id(self) -> str:
        """The id as the client knows it."""
        return self.request.spec.request_id

    @property
    def num_completion_tokens(self) -> int:
        """Output tokens over all samples."""
        return sum(len(sample.token_ids) for sample in self.samples)

    def subscribe(self, listener: Listener) -> None:
        """Call `listener(self)` whenever something is new; it must not block."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Stop calling it."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    @property
    def attended(self) -> bool:
        """Does anybody listen?"""
        return bool(self._listeners)

    def notify(self) -> None:
        """Tell the listeners that something is new."""
        for listener in tuple(self._listeners):
            listener(self)
