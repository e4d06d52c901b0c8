"""Any server with OpenAI's API over HTTP, completions or chat, as a stream of server-sent events.

https://platform.openai.com/docs/api-reference/completions, https://docs.vllm.ai/en/latest/serving/openai_compatible_server
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from cadenza.errors import CadenzaError, UnavailableError
from cadenza_loadtest.driving.live import RequestInFlight
from cadenza_loadtest.driving.target import Clock, ServerFacts
from cadenza_loadtest.requests import LoadTestError, RequestShape
from cadenza_loadtest.targets.openai_answer import BAD_RESPONSE, StreamedAnswer, message_of

_CONNECTION = "CONNECTION"
"""The connection failed or broke."""
_UNSUPPORTED = "UNSUPPORTED"
"""Beam search, or token ids for chat, which this API does not support."""
_NO_STREAMS = ("application/json", "text/html")
"""Content types of an answer that was not streamed, or of a page of another server."""
_KEEP_ALIVE_S = 4.0
"""Shorter than servers keep an idle connection (uvicorn: 5 s), so that none closes a connection just as it is
reused."""
_START_S = 30.0
_LINE_END = re.compile("\r\n|\n|\r")


class OpenAITarget:
    """A server at a base URL, such as http://127.0.0.1:8000/v1; any number of requests at once, unless limited.

    The tokens of a message are counted by its `token_ids` if the server sends them (vLLM does on request), else a chunk
    counts as one token; the request's total is taken from `usage` at the end, if it is sent. So if a server puts
    several tokens in a chunk, totals and TPOT are right, and ITL is the time between chunks. Outputs have the length of
    the shape if the server supports `ignore_eos` and `min_tokens`, and runs do not hit each other's prefixes in a
    prefix cache if it supports `cache_salt`, as vLLM does; `plain_fields` omits these and `return_token_ids` for a
    server that refuses them.
    """

    def __init__(
        self,
        url: str,
        *,
        endpoint: Literal["completions", "chat"] = "completions",
        model: str | None = None,
        api_key: str | None = None,
        plain_fields: bool = False,
        connections: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        clock: Clock = time.perf_counter,
    ) -> None:
        """`model` defaults to the first that the server lists. `connections`: most at once; requests wait for one in
        order of arrival, before they count as sent; None: one for each running request. Raises LoadTestError for an
        invalid URL.
        """
        self.url = _base_url(url)
        self._endpoint: Literal["completions", "chat"] = endpoint
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._plain = plain_fields
        self._free = contextlib.nullcontext() if connections is None else asyncio.Semaphore(connections)
        self._temperature = temperature
        self._seed = seed
        self._clock = clock
        self._cache_salt = uuid.uuid4().hex
        self._path = "/completions" if endpoint == "completions" else "/chat/completions"
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> ServerFacts:
        """Request the models; raises UnavailableError, or CadenzaError for a server that does not list the model."""
        # aiohttp's own limit of 100 connections would delay requests silently.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        self._http = aiohttp.ClientSession(
            connector=connector, headers=self._headers, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**20
        )
        try:
            facts = await self._find_model()
        except BaseException:
            await self.close()
            raise
        self._model = str(facts["id"])
        length, meta = facts.get("max_model_len"), facts.get("meta")
        vocabulary = meta.get("n_vocab") if isinstance(meta, dict) else None  # Cadenza and llama.cpp
        return ServerFacts(
            kind="openai",
            api=self._endpoint,
            target=self.url,
            model=self._model,
            version=await self._find_version(),
            vocab_size=vocabulary if isinstance(vocabulary, int) and vocabulary > 0 else None,
            max_model_len=length if isinstance(length, int) else None,
        )

    def new_run(self) -> None:
        """Set a new cache salt: only requests with the same salt share blocks, if the server supports it."""
        self._cache_salt = uuid.uuid4().hex

    async def run(self, shape: RequestShape, prompt: list[int] | str, live: RequestInFlight) -> None:
        """See Target."""
        if shape.beam_width or (self._endpoint == "chat" and not isinstance(prompt, str)):
            live.failed(_UNSUPPORTED, "this API has no beam search, and its chat takes no token ids")
            return
        async with self._free:
            await self._send(json.dumps(self._body(shape, prompt)).encode(), live)

    async def _send(self, body: bytes, live: RequestInFlight) -> None:
        assert self._http is not None
        live.sent_s = self._clock()
        try:
            async with self._http.post(
                self.url + self._path, data=body, headers={"Content-Type": "application/json"}
            ) as response:
                if response.status != 200:
                    live.failed(f"HTTP_{response.status}", message_of(await response.read()))
                elif response.content_type in _NO_STREAMS:
                    live.failed(BAD_RESPONSE, f"{response.content_type}: {message_of(await response.read())}")
                else:
                    await self._read(response, live)
        except (aiohttp.ClientError, OSError) as error:
            live.failed(_CONNECTION, str(error) or type(error).__name__)

    async def _read(self, response: aiohttp.ClientResponse, live: RequestInFlight) -> None:
        """Read the stream to its end; raises aiohttp.ClientError or OSError if the connection breaks."""
        answer, parser = StreamedAnswer(live), EventParser()
        async for chunk in response.content.iter_any():
            now_s = self._clock()
            for data in parser.feed(chunk):
                answer.take(data, now_s)
        answer.end()

    async def close(self) -> None:
        """Disconnect."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    def _body(self, shape: RequestShape, prompt: list[int] | str) -> dict[str, Any]:
        temperature = self._temperature if shape.n == 1 else self._temperature or 1.0
        body: dict[str, Any] = {
            # As vLLM and others name adapters.
            "model": shape.adapter or self._model,
            "max_tokens": shape.num_output_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if temperature:
            body["seed"] = (self._seed * 1_000_003 + shape.index) % 2**31  # in the range that every server accepts
        if shape.n > 1:
            body["n"] = shape.n
        if shape.tenant:
            body["user"] = shape.tenant
        if not self._plain:
            body |= {
                "ignore_eos": True,
                "min_tokens": shape.num_output_tokens,
                "return_token_ids": True,
                "cache_salt": self._cache_salt,
            }
        return body

    async def _find_version(self) -> str:
        """The version as vLLM reports it beside the API; empty for other servers."""
        assert self._http is not None
        url = f"{self.url.removesuffix('/v1')}/version"
        with contextlib.suppress(aiohttp.ClientError, OSError, ValueError):
            async with asyncio.timeout(_START_S), self._http.get(url) as response:
                answer = await response.json() if response.status == 200 else None
                if isinstance(answer, dict) and isinstance(answer.get("version"), str):
                    return str(answer["version"])
        return ""

    async def _find_model(self) -> Mapping[str, Any]:
        """The entry of the model in /models; for a model given by name, the name is enough."""
        assert self._http is not None
        given = {} if self._model is None else {"id": self._model}
        try:
            async with asyncio.timeout(_START_S), self._http.get(f"{self.url}/models") as response:
                if response.status != 200:
                    if given:
                        return given
                    raise CadenzaError(
                        f"{self.url}/models: HTTP {response.status}; is --url the base URL, up to /v1? If so, give "
                        "--served-model-name"
                    )
                answer = await response.json(content_type=None)
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(f"no server at {self.url}: {str(error) or type(error).__name__}") from None
        except ValueError:
            answer = None
        models = answer.get("data") if isinstance(answer, dict) else None
        listed = [each for each in models or () if isinstance(each, dict) and "id" in each]
        for each in listed:
            if self._model in (None, each["id"]):
                return each
        if given:
            return given
        raise CadenzaError(f"{self.url}/models lists no model; give --served-model-name")


def _base_url(url: str) -> str:
    """The URL without a trailing slash, and with /v1 if it has no path. Raises LoadTestError."""
    parts = urlsplit(url.strip())
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment:
        raise LoadTestError(f"--url {url}: must be a base URL, such as http://127.0.0.1:8000/v1")
    return parts._replace(path=parts.path.rstrip("/") or "/v1").geturl()


class EventParser:
    """Turns bytes, in arbitrary chunks, into the data of events.

    Names, ids and retry times of events are not needed and ignored, as are comments.
    """

    def __init__(self) -> None:
        # A chunk may end within a character; "utf-8-sig" drops a byte order mark at the start.
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._rest = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that `chunk` completes."""
        text = self._rest + self._decoder.decode(chunk)
        # A CR at the end may be followed by the LF of the same line end.
        held = text.endswith("\r")
        *lines, self._rest = _LINE_END.split(text[:-1] if held else text)
        if held:
            self._rest += "\r"
        events: list[str] = []
        for line in lines:
            self._take(line, events)
        return events

    def _take(self, line: str, events: list[str]) -> None:
        if not line:
            if self._data:
                events.append("\n".join(self._data))
                self._data = []
            return
        name, _, value = line.partition(":")  # a comment's name is empty
        if name == "data":
            self._data.append(value.removeprefix(" "))
