"""The link between rank 0 and another rank: frames over a connected socket, a kind and bytes each. No pickle."""

from __future__ import annotations

import socket
import struct
from enum import IntEnum

_HEAD = struct.Struct("<BQ")
_MOST_BYTES = 1 << 28
"""Of a frame: plans have 2 MiB at most."""


class Frame(IntEnum):
    """What a frame says."""

    CONFIG = 1
    """To a rank that starts: its options, in JSON."""
    MEMORY = 2
    """The memory of exchanges has its size."""
    HELD = 3
    """From a rank that has loaded its part, in JSON: blocks that fit, digest of its weights."""
    SIZES = 4
    """What all ranks have, in JSON; the answer to HELD."""
    REFUSED = 5
    """From a rank that cannot start, or that failed within a step: the reason."""
    READY = 6
    """From a rank that waits for plans."""
    PLAN = 7
    STATUS = 8
    """From a rank that has applied a plan: a digest of its slots, or why it cannot run it."""
    VERDICT = 9
    """Empty: all ranks run the step. Else the reason why none does."""
    DRAFTS = 10
    SAMPLED = 11
    FAILED = 12
    """The step has failed on another rank."""
    CLEAR = 13
    CLEARED = 14
    """From a rank that has no slots and is in no exchange."""
    BEGIN = 15
    """All ranks have cleared."""
    ADAPTER = 16
    """Load or unload an adapter, in JSON; the answer: why it is refused."""
    SETTLED = 17
    """Before a plan: how many of the session's steps rank 0 has settled, 8 bytes, little endian."""


class LinkClosed(Exception):
    """The process at the other end is gone."""


class Link:
    """One end of a link. `send` and `receive` block; each is for one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, kind: Frame, content: bytes = b"") -> None:
        """Send a frame; raises LinkClosed."""
        try:
            self._end.sendall(_HEAD.pack(kind, len(content)) + content)
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def receive(self) -> tuple[Frame, bytes]:
        """Wait for the next frame; raises LinkClosed."""
        kind, length = _HEAD.unpack(self._read(_HEAD.size))
        if length > _MOST_BYTES:
            raise LinkClosed(f"a frame of {length} bytes")
        return Frame(kind), self._read(length)

    def close(self) -> None:
        """End both directions."""
        self._end.close()

    def _read(self, count: int) -> bytes:
        read = bytearray(count)
        left = memoryview(read)
        while left:
            try:
                received = self._end.recv_into(left)
            except OSError as error:
                raise LinkClosed(str(error)) from error
            if not received:
                raise LinkClosed("the other end is closed")
            left = left[received:]
        return bytes(read)
