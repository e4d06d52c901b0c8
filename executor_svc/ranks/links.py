"""The link between rank 0 and another rank: frames over a connected socket, a kind and bytes each. No pickle.

Columns of integers in a frame: their lengths, then their numbers, little endian.

`watch` notices within 2 s that the process or the machine at the other end of a connection is gone.

The end of a process closes its connections. A machine that vanishes, or a network that is cut, does not: so both sides
send a byte every HEARTBEAT_S, and the system ends the connection when the other machine has not confirmed one for
UNCONFIRMED_S, in which it sends it again several times. A process that is merely busy, or stopped, is not gone: its
system confirms what it gets. The other connections have no such limit: there, a side that is busy takes nothing.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum

import numpy as np

from executor_svc.plan.arrays import IntArray

_HEAD = struct.Struct("<BQ")
_MOST_BYTES = 1 << 24
"""Of a frame that is not a part of an exchange: plans have 2 MiB at most."""
_COPIED_BYTES = 1 << 16
"""Contents up to this length are sent together with their head."""
HEARTBEAT_S = 0.4
UNCONFIRMED_S = 1.5
"""On Linux; elsewhere a machine that vanishes is noticed when the system gives up."""
_BEAT = b"\0"


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
    """From a rank that has applied a plan: a digest of it and of its slots, or why it cannot run it."""
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
    WELCOME = 18
    """From rank 0: the rank may load."""
    PART = 19
    """Rows of an exchange."""
    LAYERS = 20
    """To a rank that starts, in JSON: the layers that rank 0's draft model or head has in its blocks."""


class LinkClosed(Exception):
    """The process at the other end is gone."""


class Link:
    """One end of a link. `send` and `receive` block; each is for one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        """end: connected, without a timeout."""
        self._end = end

    @property
    def end(self) -> socket.socket:
        """The socket, for callers that send something else than frames."""
        return self._end

    def limit(self, seconds: float | None) -> None:
        """Let nothing wait longer than this, as if the other end were closed then; None: as long as it takes."""
        self._end.settimeout(seconds)

    def send(self, kind: Frame, content: bytes | memoryview = b"") -> None:
        """Send a frame; raises LinkClosed."""
        head = _HEAD.pack(kind, len(content))
        try:
            if len(content) <= _COPIED_BYTES:
                self._end.sendall(head + content)
            else:
                self._end.sendall(head)
                self._end.sendall(content)
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def receive(self, most_bytes: int = _MOST_BYTES) -> tuple[Frame, bytes]:
        """Wait for the next frame, of at most so many bytes; raises LinkClosed."""
        kind, length = self._head()
        if length > most_bytes:
            raise LinkClosed(f"a frame of {length} bytes")
        read = bytearray(length)
        self._read(memoryview(read))
        return kind, bytes(read)

    def receive_part(self, into: memoryview) -> None:
        """Wait for a part of an exchange, of just this length; raises LinkClosed."""
        kind, length = self._head()
        if kind != Frame.PART or length != len(into):
            raise LinkClosed(f"{kind.name} of {length} bytes in place of a part of {len(into)} bytes")
        self._read(into)

    def close(self) -> None:
        """End both directions; what another thread sends or receives ends with LinkClosed."""
        with suppress(OSError):
            # Not the method of a TLS socket, which would send in plain text meanwhile.
            socket.socket.shutdown(self._end, socket.SHUT_RDWR)
        self._end.close()

    def _head(self) -> tuple[Frame, int]:
        read = bytearray(_HEAD.size)
        self._read(memoryview(read))
        kind, length = _HEAD.unpack(read)
        try:
            return Frame(kind), length
        except ValueError:
            raise LinkClosed(f"a frame of kind {kind}") from None

    def _read(self, into: memoryview) -> None:
        while into:
            try:
                received = self._end.recv_into(into)
            except (OSError, ValueError) as error:  # ValueError: a TLS socket that was closed meanwhile
                raise LinkClosed(str(error)) from error
            if not received:
                raise LinkClosed("the other end is closed")
            into = into[received:]


def write_columns(*columns: IntArray) -> bytes:
    """Return columns [n] each."""
    lengths = np.array([len(column) for column in columns], "<i8").tobytes()
    return lengths + b"".join(column.astype("<i8").tobytes() for column in columns)


def read_columns(content: bytes, count: int) -> Sequence[IntArray]:
    """Reverse `write_columns`; raises ValueError for another number of them."""
    lengths = np.frombuffer(content[: 8 * count], "<i8")
    numbers = np.frombuffer(content[8 * count :], "<i8").astype(np.int64)
    if len(lengths) != count or lengths.sum() != len(numbers):
        raise ValueError(f"{len(numbers)} numbers for columns of {lengths.tolist()}")
    return np.split(numbers, lengths.cumsum()[:-1])


def watch(link: Link, on_end: Callable[[str], None]) -> None:
    """Call on_end with how the connection ended, once it does, in a thread of its own."""

    def run() -> None:
        try:
            _beat(link)
        except (OSError, ValueError) as error:  # ValueError: a TLS socket that was closed meanwhile
            on_end(str(getattr(error, "strerror", None) or error).lower())

    link.end.settimeout(HEARTBEAT_S)
    if sys.platform == "linux":
        link.end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNCONFIRMED_S * 1000))
    threading.Thread(target=run, name="watch of a rank", daemon=True).start()


def _beat(link: Link) -> None:
    """Send and receive until the end; raises OSError or ValueError. One thread does both, as TLS needs it."""
    sent = 0.0
    while True:
        if time.monotonic() - sent >= HEARTBEAT_S:
            link.end.sendall(_BEAT)
            sent = time.monotonic()
        try:
            if not link.end.recv(64):
                raise ConnectionResetError("its process ended")
        except TimeoutError as error:
            if error.errno is not None:  # of the connection, not of this wait
                raise
