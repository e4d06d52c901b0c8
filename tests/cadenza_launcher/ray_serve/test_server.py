"""When the replica of Ray Serve is healthy, and how it ends."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

pytest.importorskip("starlette", reason="Ray Serve is not installed: the extra ray-serve")

from cadenza_launcher.ray_serve import server


class Services:
    """In place of LocalServices."""

    def __init__(self, http: str, on_log: Any, on_event: Any, **options: Any) -> None:
        self.http, self.options = options["gateway"], options
        self.ends: list[str] = []
        on_log("scheduler", "a line")

    def drain(self) -> None:
        self.ends.append("drain")

    def close(self) -> None:
        self.ends.append("close")


@contextlib.asynccontextmanager
async def replica(unhealthy_after_s: float, statuses: list[int]) -> AsyncIterator[tuple[Any, web.AppRunner]]:
    """A replica whose gateway answers one of these at a time."""

    async def health(_request: web.Request) -> web.Response:
        return web.Response(status=statuses.pop(0), text="no executor")

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made = server.Server({"gateway": f"127.0.0.1:{runner.addresses[0][1]}"}, unhealthy_after_s)
    try:
        yield made, runner
    finally:
        await made._forwarder.close()
        await runner.cleanup()


@pytest.fixture(autouse=True)
def _no_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LocalServices", Services)


async def test_a_replica_is_healthy_while_it_serves_and_while_it_may_serve_again() -> None:
    async with replica(1000.0, [200, 503, 200]) as (made, _):
        for _ in range(3):
            await made.check_health()
    async with replica(0.0, [200, 503]) as (made, _):
        await made.check_health()
        with pytest.raises(RuntimeError, match="not serving for 0 s: 503: no executor"):
            await made.check_health()


async def test_a_replica_without_its_gateway_is_not_healthy() -> None:
    async with replica(1000.0, []) as (made, runner):
        await runner.cleanup()
        with pytest.raises(aiohttp.ClientError):
            await made.check_health()


async def test_a_replica_logs_where_serve_does_and_drains_before_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ray.serve"):
        async with replica(0.0, []) as (made, _):
            services = made._services
            made.__del__()
            made.__del__()
    assert services.ends == ["drain", "close"]
    assert caplog.messages == ["scheduler: a line"]
