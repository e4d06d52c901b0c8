"""Leases: which scheduler holds the executor, until when, and which other ones are refused.

A lease lasts for as long as its session's stream. Each message of the scheduler renews it, and it ends when none has
come for 2 s: a stream whose other end was killed or cut off stays open for much longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc

from cadenza.v1 import execution_pb2 as pb
from cadenza_common.serving.heartbeats import PeerSilence
from cadenza_common.wire.transport import PROTOCOL_VERSION

_MAX_ID_BYTES = 256
_MAX_EPOCH = 2**63
"""An accepted epoch must leave larger ones for later sessions."""
_MAX_PROCESSES = 64


class SessionRefusal(Exception):
    """Ends a stream with a status code, a message, and what a refused scheduler needs to know."""

    def __init__(self, code: grpc.StatusCode, message: str, detail: pb.SessionRefusal | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.detail = detail


class Lease:
    """One session's hold on the executor."""

    def __init__(self, opening: pb.OpenSession, peer: str, silence_s: float, clock: Callable[[], float]) -> None:
        self.scheduler_id = opening.scheduler_id
        self.scheduler_incarnation = opening.scheduler_incarnation
        self.epoch = opening.epoch
        self.peer = peer
        self.silence = PeerSilence(silence_s, clock())
        self.refusal: SessionRefusal | None = None
        """Why the lease ended before its stream; None: it has not."""
        self.serving: asyncio.Task[None] | None = None
        self.announce_stop: Callable[[], None] = lambda: None
        """Sends the scheduler a message that the executor stops, after all results so far; set by the session."""
        self._clock = clock
        self._renewed_at = clock()

    @property
    def process(self) -> tuple[str, int]:
        """The process that holds it: scheduler id and incarnation."""
        return self.scheduler_id, self.scheduler_incarnation

    def renew(self) -> None:
        """Record a message of the scheduler."""
        self.silence.heard()
        self._renewed_at = self._clock()

    @property
    def silent_ns(self) -> int:
        """Nanoseconds since the scheduler's last message."""
        return round((self._clock() - self._renewed_at) * 1e9)

    def end(self, refusal: SessionRefusal) -> None:
        """End the stream with this status, even while a message waits for a scheduler that reads nothing."""
        self.refusal = refusal
        if self.serving is not None:
            self.serving.cancel()


class Leases:
    """Grants the executor to one scheduler at a time, under increasing epochs."""

    def __init__(self, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """silence_s: a lease ends after so many seconds without a message. clock: monotonic, in seconds."""
        self._silence_s = silence_s
        self._clock = clock
        self._current: Lease | None = None
        self._last_epoch = 0
        self._closed: SessionRefusal | None = None
        self.num_granted = 0
        """Number of sessions that were granted the executor."""
        self.num_refused = 0
        self._processes: list[tuple[str, int]] = []
        """(scheduler id, incarnation) of the processes that held the executor, in the order of their first sessions."""

    @property
    def current(self) -> Lease | None:
        """The lease of the scheduler that holds the executor."""
        return self._current

    def close(self, refusal: SessionRefusal) -> None:
        """Refuse every opening from now on."""
        self._closed = refusal

    def take(self, opening: pb.OpenSession, peer: str) -> Lease:
        """Grant the executor to the session that this message opens; raises Refusal.

        An older session of the same scheduler ends: a new process takes over at once.
        """
        try:
            self._check(opening)
        except SessionRefusal:
            self.num_refused += 1
            raise
        self.num_granted += 1
        current = self._current
        if current is not None:
            by = "this process" if current.scheduler_incarnation == opening.scheduler_incarnation else "another process"
            message = f"{by} of scheduler {opening.scheduler_id}, at {peer}, has opened a newer session"
            current.end(SessionRefusal(grpc.StatusCode.ABORTED, message))
        process = (opening.scheduler_id, opening.scheduler_incarnation)
        if process not in self._processes:
            self._processes.append(process)
            del self._processes[:-_MAX_PROCESSES]
        self._last_epoch = opening.epoch
        self._current = Lease(opening, peer, self._silence_s, self._clock)
        return self._current

    def release(self, lease: Lease) -> None:
        """End a lease; one that was replaced has ended already."""
        if self._current is lease:
            self._current = None

    def _check(self, opening: pb.OpenSession) -> None:
        """Raise Refusal for an opening that is invalid, fenced, too late or of another scheduler than the holder."""
        if self._closed is not None:
            raise self._closed
        if opening.protocol_version != PROTOCOL_VERSION:
            message = f"protocol version {opening.protocol_version} is not supported, {PROTOCOL_VERSION} is"
            raise SessionRefusal(grpc.StatusCode.FAILED_PRECONDITION, message)
        if not 0 < len(opening.scheduler_id.encode()) <= _MAX_ID_BYTES:
            message = f"open.scheduler_id must have 1 to {_MAX_ID_BYTES} bytes"
            raise SessionRefusal(grpc.StatusCode.INVALID_ARGUMENT, message)
        if opening.epoch > _MAX_EPOCH:
            raise SessionRefusal(grpc.StatusCode.INVALID_ARGUMENT, f"open.epoch {opening.epoch} is over {_MAX_EPOCH}")
        next_epoch = self._last_epoch + 1
        if self._is_fenced(opening):
            # Its successor may have lost this executor meanwhile, but it is the successor that has the requests.
            message = f"a newer process of scheduler {opening.scheduler_id} has taken this executor over"
            raise SessionRefusal(grpc.StatusCode.ABORTED, message, pb.SessionRefusal(next_epoch=next_epoch))
        current = self._current
        if current is not None and current.scheduler_id != opening.scheduler_id:
            silent_ns = current.silent_ns
            raise SessionRefusal(
                grpc.StatusCode.PERMISSION_DENIED,
                f"scheduler {current.scheduler_id} at {current.peer} holds this executor, in epoch {current.epoch}; "
                f"its last message came {silent_ns / 1e9:.1f} s ago",
                pb.SessionRefusal(next_epoch=next_epoch, holder_id=current.scheduler_id, holder_silent_ns=silent_ns),
            )
        if opening.epoch < next_epoch:
            message = f"epoch {opening.epoch} is not larger than the last, {self._last_epoch}"
            raise SessionRefusal(grpc.StatusCode.FAILED_PRECONDITION, message, pb.SessionRefusal(next_epoch=next_epoch))

    def _is_fenced(self, opening: pb.OpenSession) -> bool:
        """Whether a newer process with the same scheduler id has held the executor."""
        processes = [incarnation for name, incarnation in self._processes if name == opening.scheduler_id]
        return opening.scheduler_incarnation in processes[:-1]
