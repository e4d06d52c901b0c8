"""A gateway in this process, over real HTTP on port 0."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientSession

from gateway_svc.app import make_state
from gateway_svc.config import GatewayConfig
from gateway_svc.listeners import Listeners
from gateway_svc.page_starter import PageRights
from gateway_svc.state import State


@dataclass
class Gateway:
    """A running one, and a client's connection to it."""

    state: State
    http: ClientSession
    address: str
    addresses: dict[str, str]
    """Of all listeners, by option."""
    paths: tuple[str, ...]
    """As they were added, with {name} for a part that is any."""

    async def post(self, path: str, body: Any, status: int = 200, **headers: str) -> Any:
        """Send a body, check the status, and return the answer's JSON."""
        data = body if isinstance(body, (bytes, str)) else json.dumps(body)
        raw = data if isinstance(data, bytes) else data.encode()
        async with self.http.post(path, data=io.BytesIO(raw), headers=named(headers)) as response:
            text = await response.text()
            assert response.status == status, f"{response.status}: {text}"
            return json.loads(text)

    async def get(self, path: str, status: int = 200, **headers: str) -> Any:
        """The same without a body."""
        async with self.http.get(path, headers=named(headers)) as response:
            text = await response.text()
            assert response.status == status, f"{response.status}: {text}"
            return json.loads(text)

    async def events(self, path: str, body: Any, **headers: str) -> list[Any]:
        """Send a body, and return the data of all events, [DONE] as a text; each event has its name as `event`."""
        async with self.http.post(path, json={**body, "stream": True}, headers=named(headers)) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            return [event async for event in read_events(response)]


def named(headers: dict[str, str]) -> dict[str, str]:
    """Headers from names of arguments; `key`: the API key."""
    if "key" in headers:
        headers = {**headers, "Authorization": f"Bearer {headers['key']}"}
        del headers["key"]
    return {name.replace("_", "-"): value for name, value in headers.items()}


async def read_events(response: Any) -> AsyncIterator[Any]:
    """The data of each event, as JSON unless it is [DONE]."""
    async for line in response.content:
        text = line.decode().rstrip("\n")
        if text.startswith("data: "):
            text = text.removeprefix("data: ")
            yield text if text == "[DONE]" else json.loads(text)
        else:
            assert not text or text.startswith("event: "), text


@contextlib.asynccontextmanager
async def gateway(target: str, page_rights: PageRights | None = None, **options: Any) -> AsyncIterator[Gateway]:
    """A gateway of the scheduler at `target`."""
    config = GatewayConfig(target=target, http="127.0.0.1:0", **options)
    state = make_state(config, page_rights)
    listeners = Listeners(state)
    try:
        addresses = await listeners.start()
        async with ClientSession(f"http://{addresses['http']}") as http:
            yield Gateway(state, http, addresses["http"], addresses, listeners.paths)
    finally:
        await listeners.close()


def completion_text(events: list[Any]) -> str:
    """The text of a streamed completion with one choice."""
    return "".join(choice["text"] for event in events[:-1] for choice in event["choices"])


def chat_text(events: list[Any], index: int = 0) -> str:
    """The text of a choice of a streamed chat."""
    return "".join(
        choice["delta"].get("content", "")
        for event in events[:-1]
        for choice in event["choices"]
        if choice["index"] == index
    )
