"""A server with OpenAI's API that answers by a script, and what it takes to ask it."""

from __future__ import annotations

import asyncio
import contextlib
import json

from aiohttp import web

from cadenza_loadtest.driving.driver import drive
from cadenza_loadtest.requests import RequestShape
from cadenza_loadtest.targets.openai import OpenAITarget
from cadenza_loadtest.workloads.prompts import Prompts


def shape(index: int, **fields) -> RequestShape:
    return RequestShape(index, **{"num_prompt_tokens": 4, "num_output_tokens": 5, **fields})


def burst(*shapes: RequestShape) -> list[tuple[float, RequestShape]]:
    return [(0.0, each) for each in shapes]


def prompts() -> Prompts:
    return Prompts(0, 512)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition is any
            await asyncio.sleep(0.002)


def chunk(text: str | None = None, *, chat: bool = False, finish: str | None = None, index: int = 0, **fields) -> str:
    said = {"delta": {"content": text} if text is not None else {}} if chat else {"text": text or ""}
    return "data: " + json.dumps({"choices": [{"index": index, "finish_reason": finish, **said, **fields}]}) + "\n\n"


def usage(prompt: int, completion: int, cached: int | None = None) -> str:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, **details}
    return "data: " + json.dumps({"choices": [], "usage": counts}) + "\n\n"


DONE = "data: [DONE]\n\n"


class Server:
    """Answers each request with the pieces that `script` holds, each written by itself."""

    def __init__(self, *script: str | bytes, status: int = 200, models: object = None) -> None:
        self.script = script
        self.status = status
        self.models = {"data": [{"id": "m1", "max_model_len": 99}, {"id": "m2"}]} if models is None else models
        self.refusal: object = {"error": {"message": "no"}}
        self.page = ""
        self.version = ""
        self.bodies: list[dict] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.going = asyncio.Event()
        self.going.set()
        self.closed_early = 0
        self.cut = False
        self.ports: set[int] = set()

    async def list_models(self, request):
        self.keys.append(request.headers.get("Authorization"))
        return web.json_response(self.models)

    async def tell_version(self, request):
        if not self.version:
            raise web.HTTPNotFound
        return web.json_response({"version": self.version})

    async def answer(self, request):
        self.paths.append(request.path)
        self.bodies.append(await request.json())
        self.ports.add(request.transport.get_extra_info("peername")[1])
        if self.status != 200:
            return web.json_response(self.refusal, status=self.status)
        if self.page:
            return web.Response(text=self.page, content_type="text/html")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self.going.wait()
            for piece in self.script:
                await response.write(piece if isinstance(piece, bytes) else piece.encode())
                await asyncio.sleep(0)
            if self.cut:
                request.transport.close()
        except (asyncio.CancelledError, ConnectionError):
            self.closed_early += 1
            raise
        return response


@contextlib.asynccontextmanager
async def served(server: Server, **options):
    app = web.Application()
    app.add_routes(
        [
            web.get("/v1/models", server.list_models),
            web.get("/version", server.tell_version),
            web.post("/v1/completions", server.answer),
            web.post("/v1/chat/completions", server.answer),
        ]
    )
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        target = OpenAITarget(f"http://127.0.0.1:{port}", **options)
        target.facts = await target.start()
        try:
            yield target
        finally:
            await target.close()
    finally:
        await runner.cleanup()


async def ask(server: Server, *shapes: RequestShape, **options):
    async with served(server, **options) as target:
        return await drive(burst(*(shapes or (shape(0),))), target, prompts(), timeout_s=20)
