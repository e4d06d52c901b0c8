"""A TCP relay between a client and a server: a slow network, or one that falls silent without a word."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

_CHUNK_BYTES = 1 << 16


@dataclass
class Relay:
    """`address` leads to the target."""

    address: str
    silent: bool = False
    """Pass nothing on, both ways, not even that a side has closed: as when a machine has lost its power."""


@asynccontextmanager
async def relay(target: str, *, delay_s: float = 0.0) -> AsyncIterator[Relay]:
    """Relay to `HOST:PORT`; each chunk takes `delay_s`."""
    host, _, port = target.rpartition(":")
    tasks: list[asyncio.Task[None]] = []
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                await asyncio.sleep(delay_s)
                if not it.silent:
                    writer.write(data)
                    await writer.drain()
        if not it.silent:
            writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
        writers.extend((writer, onward_writer))
        tasks.append(asyncio.create_task(pump(reader, onward_writer)))
        tasks.append(asyncio.create_task(pump(onward_reader, writer)))

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
