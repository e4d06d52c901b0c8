"""Requests that outlive their streams: they wait for a stream to be attached again, and their results are kept.

While no stream is attached to a request with a grace, a timer of that length runs. When it ends, the request is aborted
if it is unfinished, and forgotten. A finished request is kept also after its whole output was handed to a stream,
because nobody can see whether a client received the last message. Kept results have a limit in bytes. Beyond it,
results that were handed over go first, then the others, the oldest first.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.core.types import RequestKey
from scheduler_svc.engine.live_request import LiveRequest, LiveSample
from scheduler_svc.plan_loop.clock import Clock, ScheduledCall

_REQUEST_BYTES = 4096
_SAMPLE_BYTES = 512
_INT_BYTES = 40  # a Python int and its place in a list
_CHAR_BYTES = 4
_LOGPROBS_BYTES = 280
_TOP_LOGPROB_BYTES = 72
_ROW_BYTES = 8  # of prompt logprobs, which are in arrays


class KeptRequests:
    """Times the requests without a stream, and holds the finished ones."""

    def __init__(
        self,
        clock: Clock,
        *,
        max_bytes: int,
        max_grace_s: float,
        abort: Callable[[str, str], object],
        on_forgotten: Callable[[LiveRequest], None],
    ) -> None:
        """`abort(tenant, request_id)` ends an unfinished request; `on_forgotten` gets a finished one that leaves."""
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_grace_s = max_grace_s
        self._abort = abort
        self._on_forgotten = on_forgotten
        self._timers: dict[RequestKey, ScheduledCall] = {}
        self._finished: dict[RequestKey, LiveRequest] = {}
        """In the order in which they finished."""
        self._handed_over: dict[RequestKey, None] = {}
        """Requests whose whole output a stream has got. The order is the order in which the streams got it."""
        self.num_bytes = 0
        """Approximate size of the finished requests."""

    def find(self, key: RequestKey) -> LiveRequest | None:
        """The finished request with this key; None if none is kept."""
        return self._finished.get(key)

    def grace_s(self, live: LiveRequest) -> float:
        """Seconds that this request may be without a stream."""
        return min(live.request.resume_grace_s, self._max_grace_s)

    def on_attached(self, live: LiveRequest) -> None:
        """A stream has been attached."""
        key = live.request.spec.key
        self._cancel_timer(key)
        self._handed_over.pop(key, None)

    def on_detached(self, live: LiveRequest, *, handed_over: bool) -> None:
        """The stream has ended; `handed_over`: it has taken the whole output."""
        key, grace_s = live.request.spec.key, self.grace_s(live)
        if grace_s > 0:
            if handed_over and self._finished.get(key) is live:
                self._handed_over[key] = None
            self.wait_for_stream(live, grace_s)
        elif not live.ended:
            self._abort(*key)

    def wait_for_stream(self, live: LiveRequest, grace_s: float) -> None:
        """Let a request without a stream go on for this long, unless it has ended and is not kept."""
        key = live.request.spec.key
        # The results may have been dropped; then the key may belong to another request.
        if live.ended and self._finished.get(key) is not live:
            return
        self._cancel_timer(key)
        self._timers[key] = self._clock.call_later(grace_s, lambda: self._expire(key))

    def on_finished(self, live: LiveRequest) -> bool:
        """Keep a request that has finished; returns False if it has no grace."""
        if self.grace_s(live) <= 0:
            return False
        self._finished[live.request.spec.key] = live
        self.num_bytes += result_bytes(live)
        while self.num_bytes > self._max_bytes:
            self.forget(next(iter(self._handed_over or self._finished)))
        return True

    def forget(self, key: RequestKey) -> None:
        """Let go of a request: of its timer, and of its results if it has finished."""
        self._cancel_timer(key)
        self._handed_over.pop(key, None)
        live = self._finished.pop(key, None)
        if live is not None:
            self.num_bytes -= result_bytes(live)
            self._on_forgotten(live)

    def stop(self) -> None:
        """Cancel all timers."""
        for key in list(self._timers):
            self._cancel_timer(key)

    def _expire(self, key: RequestKey) -> None:
        del self._timers[key]
        if key in self._finished:
            self.forget(key)
        else:
            self._abort(*key)

    def _cancel_timer(self, key: RequestKey) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()


def result_bytes(live: LiveRequest) -> int:
    """Approximate memory of a finished request, in bytes; its output does not change any more."""
    num_prompt = len(live.request.spec.prompt_token_ids)
    num_bytes = _REQUEST_BYTES + _INT_BYTES * num_prompt + sum(map(_sample_bytes, live.samples))
    if live.prompt_logprobs is not None:
        num_bytes += num_prompt * _ROW_BYTES * (1 + live.prompt_logprobs.num_top)
    return num_bytes


def _sample_bytes(sample: LiveSample) -> int:
    num_bytes = _SAMPLE_BYTES + _INT_BYTES * len(sample.token_ids)
    if sample.text is not None:
        num_bytes += _CHAR_BYTES * len(sample.text.text) + _INT_BYTES * len(sample.text.text_ends)
        if sample.text.token_ends is not sample.text.text_ends:
            num_bytes += _INT_BYTES * len(sample.text.token_ends)
    if sample.logprobs:
        per_token = _LOGPROBS_BYTES + _TOP_LOGPROB_BYTES * len(sample.logprobs[0].top_token_ids)
        num_bytes += per_token * len(sample.logprobs)
    return num_bytes
