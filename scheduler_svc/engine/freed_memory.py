"""Notices when most requests have ended, so that the process can return their memory to the operating system.

The allocators keep what was freed for later requests: after a burst of long prompts that were all aborted, the process
would look as large as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.types import RequestSpec
from scheduler_svc.plan_loop.clock import Clock, ScheduledCall

MIN_FREED_TOKENS = 250_000
"""Prompt tokens, 15 MB or more: freeing less is not worth a pause."""
MAX_LIVE_TOKENS = 50_000
"""Prompt tokens of unfinished requests: a collection looks at each, and must not hold the event loop for long."""
_IDLE_S = 60.0
"""A service without requests has its memory released again after so long at the earliest."""
_DELAY_S = 1.0
"""By then, streams have sent the last output of requests that have ended, and nothing refers to them."""


class FreedMemory:
    """Calls `release` when most prompts that were in memory since its last call are gone, or no request is left.

    A steadily busy service never gets there: new requests use the memory of ended ones.
    """

    def __init__(self, clock: Clock, release: Callable[[], None] | None) -> None:
        self._clock = clock
        self._release = release
        self._num_tokens = 0
        self._peak = 0
        self._timer: ScheduledCall | None = None
        self._released_at = clock.monotonic()

    def on_arrival(self, spec: RequestSpec) -> None:
        """A request was queued."""
        self._num_tokens += _num_tokens(spec)
        self._peak = max(self._peak, self._num_tokens)

    def on_ended(self, spec: RequestSpec) -> None:
        """A request has ended."""
        self._num_tokens -= _num_tokens(spec)
        if self._release is not None and self._timer is None and self._is_due:
            self._timer = self._clock.call_later(_DELAY_S, self._call)

    def stop(self) -> None:
        """Stop: `release` is not called again."""
        self._release = None
        if self._timer is not None:
            self._timer.cancel()

    @property
    def _is_due(self) -> bool:
        has_shrunk = self._num_tokens <= MAX_LIVE_TOKENS and self._peak - self._num_tokens >= MIN_FREED_TOKENS
        return has_shrunk or (not self._num_tokens and self._clock.monotonic() >= self._released_at + _IDLE_S)

    def _call(self) -> None:
        self._timer = None
        # A new burst may have come meanwhile, and uses the memory.
        if self._release is not None and self._is_due:
            self._peak = self._num_tokens
            self._released_at = self._clock.monotonic()
            self._release()


def release_finished(sequences: Iterable[Sequence]) -> None:
    """Let go of finished sequences whose group has finished."""
    for sequence in sequences:
        if sequence.group.finished:
            sequence.group.release_sequences()


def _num_tokens(spec: RequestSpec) -> int:
    return len(spec.prompt_token_ids) * spec.num_sequences
