"""A TCP relay between a client and a server: a slow network, one that falls silent without a word, one that cuts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_CHUNK_BYTES = 1 << 16


@dataclass
class Relay:
    """`address` leads to the target."""

    address: str
    silent: bool = False
    """Pass nothing on, both ways, not even that a side has closed: as when a machine has lost its power."""
    refuses: bool = False
    """Close new connections at once."""
    cut_after: Callable[[], int | None] = lambda: None
    """Called for each connection: bytes from the server after which it is cut; None: never."""
    num_cuts: int = 0
    connected: set[asyncio.StreamWriter] = field(default_factory=set)

    def cut(self) -> None:
        """Reset all connections; what is on the way is lost."""
        for writer in self.connected:
            writer.transport.abort()
        self.connected.clear()


@asynccontextmanager
async def relay(target: str, *, delay_s: float = 0.0) -> AsyncIterator[Relay]:
    """Relay to `HOST:PORT`; each chunk takes `delay_s`."""
    host, _, port = target.rpartition(":")
    tasks: list[asyncio.Task[None]] = []
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_bytes: int | None) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                await asyncio.sleep(delay_s)
                if num_bytes is not None:
                    data = data[:num_bytes]
                    num_bytes -= len(data)
                if not it.silent:
                    writer.write(data)
                    await writer.drain()
                if num_bytes == 0:
                    it.num_cuts += 1
                    it.cut()
        if not it.silent:
            writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        if it.refuses:
            writer.transport.abort()
            return
        try:
            onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        writers.append(onward_writer)
        it.connected.update((writer, onward_writer))
        tasks.append(asyncio.create_task(pump(reader, onward_writer, None)))
        tasks.append(asyncio.create_task(pump(onward_reader, writer, it.cut_after())))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    it = Relay(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield it
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.close()
