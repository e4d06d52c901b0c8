"""The page's paths: its files at /, its data below /page/."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from aiohttp import web

from gateway_svc.http.errors import ApiError, bad_request
from gateway_svc.http.reading import read_body
from gateway_svc.http.sending import EventStream
from gateway_svc.page.chat import chat
from gateway_svc.page.doors import Doors
from gateway_svc.page.feed import MAX_PAGES, Feed
from gateway_svc.state import STATE, State

_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The browser loads nothing from elsewhere."""
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageContext:
    """What the page's handlers share."""

    files: dict[str, PageFile]
    doors: Doors
    feed: Feed
    kill: Callable[[str], None] | None
    """Kills the executor at an address; None: nobody here can."""


PAGE = web.AppKey("page", PageContext)


def add_page(app: web.Application, state: State) -> None:
    """Add the page's paths."""
    rights = state.page_rights
    doors = Doors(state, rights.token)
    app[PAGE] = PageContext(page_files(), doors, Feed(state.link.watching()), rights.kill)
    app.add_routes(
        [
            web.get("/", show_file),
            web.get("/page/about", about),
            web.get("/page/events", events),
            web.post("/page/chat", playground),
            web.post("/page/kill", kill),
            web.get("/page/{file:.+}", show_file),
        ]
    )
    app.cleanup_ctx.append(_closed)
    app.on_shutdown.append(_end_views)


async def show_file(request: web.Request) -> web.Response:
    """A file of the page."""
    page = request.app[PAGE]
    page.doors.check_host(request)
    file = page.files.get(request.match_info.get("file", _INDEX))
    if file is None:
        raise web.HTTPNotFound
    headers = {**HEADERS, "Content-Type": file.content_type, "ETag": f'"{file.etag}"'}
    if any(tag.value == file.etag for tag in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    return web.Response(body=file.body, headers=headers)


async def about(request: web.Request) -> web.Response:
    """What the page can do here: whether this request has a right, and whether executors can be killed."""
    page = request.app[PAGE]
    page.doors.check_origin(request)
    fields = {"has_right": page.doors.has_right(request), "can_kill": page.kill is not None}
    return web.json_response(fields, headers={"Cache-Control": "no-store"})


async def events(request: web.Request) -> web.StreamResponse:
    """The page's data, as they change."""
    page, state = request.app[PAGE], request.app[STATE]
    has_right = await page.doors.check_view(request)
    if page.feed.num_views >= MAX_PAGES or _is_stopping(state):
        raise ApiError(503, f"{MAX_PAGES} pages are open, which is the limit, or the gateway stops", code="unavailable")
    stream = EventStream(request, state.config.http_write_timeout_s)
    async with page.feed.view(has_right=has_right) as view:
        while sent := await view.take():
            await stream.write(sent)
            if _is_stopping(state):  # looked at each second: there are events so often
                break
    if not stream.has_begun:
        raise ApiError(503, "the gateway is stopping", code="unavailable")
    return await stream.end()


async def playground(request: web.Request) -> web.StreamResponse:
    """A chat, with the key of its caller."""
    page = request.app[PAGE]
    page.doors.check_origin(request)
    return await chat(request, page.feed)


async def kill(request: web.Request) -> web.Response:
    """Kill an executor, so that one sees the streams go on: whoever started it kills it, and starts it again."""
    page = request.app[PAGE]
    page.doors.check_right(request)
    target = await read_body(request, _executor)
    if page.kill is None:
        raise ApiError(404, "executors are killed where `cadenza up --page-demo` started them", code="unknown_path")
    executors = (await page.feed.watching.server_info()).executors
    if target not in [each.target for each in executors]:
        raise bad_request("there is no such executor", "executor")
    page.kill(str(target))
    return web.json_response({"killed": target}, status=202)


def _executor(body: Mapping[str, Any]) -> Any:
    return body.get("executor")


def _is_stopping(state: State) -> bool:
    return state.is_stopping


async def _closed(app: web.Application) -> AsyncIterator[None]:
    yield
    await app[PAGE].feed.close()


async def _end_views(app: web.Application) -> None:
    app[PAGE].feed.end_views()


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file."""

    body: bytes
    content_type: str
    etag: str


def page_files() -> dict[str, PageFile]:
    """All files by their path in the page, such as "index.html" and "vendor/uPlot.iife.min.js"."""
    return dict(_files(resources.files("gateway_svc.page") / "static", ""))


def _files(folder: Traversable, prefix: str) -> list[tuple[str, PageFile]]:
    found = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _files(entry, f"{prefix}{entry.name}/")
        elif (suffix := entry.name[entry.name.rfind(".") :]) in _TYPES:
            body = entry.read_bytes()
            etag = hashlib.sha256(body).hexdigest()[:20]
            found.append((f"{prefix}{entry.name}", PageFile(body, _TYPES[suffix], etag)))
    return found
