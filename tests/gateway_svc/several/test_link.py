"""The gateway's link to the launcher of several models: it serves when it has heard of all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway_svc.several.link import LinkToAll
from gateway_svc.several.wire import Bounds, ModelStatus, write_line


class Launcher:
    """Listens in a launcher's place, and says what a test tells it to."""

    def __init__(self) -> None:
        self.connections: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def heard(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.connections.put(writer)


async def until_listed(link: LinkToAll, *names: str) -> None:
    async with asyncio.timeout(20):
        while [each.status.name for each in link.roster.models] != list(names):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_it_serves_when_it_has_heard_of_every_model_and_not_before(tmp_path: Path) -> None:
    launcher = Launcher()
    server = await asyncio.start_unix_server(launcher.heard, tmp_path / "pool")
    link = LinkToAll(str(tmp_path / "pool"))
    waiting = asyncio.create_task(link.wait_serving())
    link.start()
    async with server, asyncio.timeout(30):
        writer = await launcher.connections.get()
        for index, name in enumerate("ab"):
            writer.write(write_line(ModelStatus(name, f"models/{name}")))
            await until_listed(link, *"ab"[: index + 1])
            assert not link.is_serving
            assert link.is_away
            assert not waiting.done()
        writer.write(write_line(Bounds(max_loaded=1)))
        await waiting
        assert link.is_serving
        assert link.roster.bounds.max_loaded == 1
        # Another connection after a lost one: the same again.
        writer.close()
        again = await launcher.connections.get()
        assert not link.is_serving
        again.write(write_line(Bounds(max_loaded=2)))
        await link.wait_serving()
        assert link.roster.bounds.max_loaded == 2
        await link.close()
        again.close()
