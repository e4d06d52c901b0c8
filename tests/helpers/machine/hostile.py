"""Raw HTTP/2 connections that break the rules of good behaviour: for tests of a server's limits."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
MAX_FRAME = 16384


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """One frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def hpack(headers: list[tuple[str, str]]) -> bytes:
    """Headers as literals without indexing and without Huffman codes (RFC 7541, section 6.2.2)."""
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers)


def _text(text: str) -> bytes:
    raw, length = text.encode(), len(text.encode())
    if length < 127:
        return bytes([length]) + raw
    encoded, rest = bytearray([127]), length - 127
    while rest >= 128:
        encoded.append(rest % 128 + 128)
        rest //= 128
    return bytes([*encoded, rest]) + raw


def call_headers(method: str, *more: tuple[str, str]) -> bytes:
    """The headers of a gRPC call."""
    return hpack(
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", "test"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *more,
        ]
    )


@dataclass
class Hostile:
    """One connection; a task reads what the server sends, and answers its pings and settings."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    answers: bool = True
    """Whether it answers pings and settings; a connection without a preface must not."""
    frames: list[tuple[int, int, bytes]] = field(default_factory=list)
    """(kind, stream, payload) of each frame that came."""
    settings: asyncio.Event = field(default_factory=asyncio.Event)
    """The server's settings have come."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    window: int = 65_535
    """Bytes of data that the server takes on this connection now (RFC 9113, section 5.2)."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        tls: ssl.SSLContext | None = None,
        preface: bool = True,
        answers: bool = True,
        local: str | None = None,
    ) -> Hostile:
        """Connect, and send what begins a connection unless it is to stay silent."""
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=tls, server_hostname="localhost" if tls else None,
            local_addr=None if local is None else (local, 0),
        )  # fmt: skip
        each = cls(reader, writer, answers=preface and answers)
        if preface:
            each.send(PREFACE + frame(SETTINGS))
        each._task = asyncio.create_task(each._read())
        return each

    def send(self, raw: bytes) -> None:
        """Send bytes; a closed connection takes them in silence."""
        if self.closed.is_set():
            return
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write(raw)

    def begin(self, stream: int, method: str, *more: tuple[str, str]) -> None:
        """Begin a call, without a message."""
        self.send(frame(HEADERS, call_headers(method, *more), flags=END_HEADERS, stream=stream))

    def of_kind(self, kind: int) -> list[tuple[int, bytes]]:
        """(stream, payload) of the frames of one kind."""
        return [(stream, payload) for each, stream, payload in self.frames if each == kind]

    async def send_data(self, stream: int, payload: bytes) -> None:
        """Send a part of a message as soon as the server takes it."""
        await self.until(lambda: self.window >= len(payload) or self.closed.is_set())
        self.window -= len(payload)
        self.send(frame(DATA, payload, stream=stream))

    async def until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Wait until what the server has sent fulfils a condition; raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def drain(self) -> None:
        """Wait until the connection takes more."""
        with contextlib.suppress(OSError):
            await self.writer.drain()

    async def close(self) -> None:
        """Close the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def _read(self) -> None:
        try:
            while True:
                head = await self.reader.readexactly(9)
                payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
                self.frames.append((kind, stream, payload))
                self._changed.set()
                if kind == WINDOW_UPDATE and stream == 0:
                    self.window += int.from_bytes(payload, "big")
                if kind == SETTINGS:
                    self.settings.set()
                if self.answers and kind in (PING, SETTINGS) and not flags & ACK:
                    self.send(frame(kind, payload if kind == PING else b"", flags=ACK))
        except (asyncio.IncompleteReadError, OSError):
            self.closed.set()
            self._changed.set()
