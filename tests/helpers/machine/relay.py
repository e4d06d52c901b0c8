"""A TCP relay between a client and a server: a network that is slow, falls silent, cuts, halves or repeats bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_CHUNK_BYTES = 1 << 16


@dataclass(eq=False)
class Connection:
    """One connection: the client's socket, and the server's."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    silent: bool = False
    """Pass nothing on, on this connection."""

    def cut(self) -> None:
        """Reset it on both sides."""
        self.client.transport.abort()
        self.server.transport.abort()

    def cut_client(self) -> None:
        """Reset it for the client alone: the server keeps a half-open connection and learns nothing."""
        self.silent = True
        self.client.transport.abort()


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
    delay_s: float = 0.0
    """Each chunk takes so long."""
    bytes_per_s: float | None = None
    """Each direction of a connection passes on so many; None: no limit."""
    slow_close_s: float = 0.0
    """A side learns so much later that the other one has closed the connection."""
    num_to_halve: int = 0
    """So many of the next chunks are passed on by half, and their connections cut."""
    num_to_repeat: int = 0
    """So many of the next chunks are passed on twice."""
    num_cuts: int = 0
    connections: set[Connection] = field(default_factory=set)
    flows: asyncio.Event = field(default_factory=asyncio.Event)
    """Not set: bytes wait, none is lost, as when packets are lost and sent again."""

    def __post_init__(self) -> None:
        self.flows.set()

    def cut(self) -> None:
        """Reset all connections; what is on the way is lost."""
        for connection in self.connections:
            connection.cut()
        self.connections.clear()

    def cut_servers(self) -> None:
        """Reset all connections to the server; the clients learn of it `slow_close_s` later."""
        for connection in self.connections:
            connection.server.transport.abort()

    def damaged(self, data: bytes) -> tuple[bytes, bool]:
        """What becomes of a chunk, and whether the connection is cut after it."""
        if self.num_to_halve:
            self.num_to_halve -= 1
            return data[: len(data) // 2], True
        # A part of a frame, sent twice, could be read as another message: no network does that to TCP.
        if self.num_to_repeat and len(data) < _CHUNK_BYTES:
            self.num_to_repeat -= 1
            return data + data, False
        return data, False

    async def pump(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None
    ) -> None:
        """Pass bytes on until a side closes; limit: the number of bytes after which all connections are cut."""
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                await asyncio.sleep(self.delay_s + (len(data) / self.bytes_per_s if self.bytes_per_s else 0.0))
                await self.flows.wait()
                if limit is not None:
                    data = data[:limit]
                    limit -= len(data)
                data, cuts = self.damaged(data)
                if not (self.silent or connection.silent):
                    writer.write(data)
                    await writer.drain()
                if cuts:
                    connection.cut()
                if limit == 0:
                    self.num_cuts += 1
                    self.cut()
        await asyncio.sleep(self.slow_close_s)
        if not (self.silent or connection.silent):
            writer.close()
            self.connections.discard(connection)


@asynccontextmanager
async def relay(target: str | Callable[[], str], *, delay_s: float = 0.0) -> AsyncIterator[Relay]:
    """Relay to `HOST:PORT`, or to what a function returns at each connection; each chunk takes `delay_s`."""
    tasks: set[asyncio.Task[None]] = set()
    writers: set[asyncio.StreamWriter] = set()

    def start(
        connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None
    ) -> None:
        task = asyncio.create_task(it.pump(connection, reader, writer, limit))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        if it.refuses:
            writer.transport.abort()
            return
        try:
            host, _, port = (target if isinstance(target, str) else target()).rpartition(":")
            onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        writers.add(onward_writer)
        connection = Connection(writer, onward_writer)
        it.connections.add(connection)
        start(connection, reader, onward_writer, None)
        start(connection, onward_reader, writer, it.cut_after())

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    it = Relay(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", delay_s=delay_s)
    try:
        yield it
    finally:
        server.close()
        running = list(tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for writer in writers:
            writer.close()
