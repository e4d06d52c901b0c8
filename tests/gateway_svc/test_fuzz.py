"""Any body on any path, and any bytes: never a 500, never a request that is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cadenza.calls.loop_thread import LoopThread
from cadenza_common.wire.transport import parse_address
from gateway_svc.fields.tables import APIS, REQUIRED
from tests.helpers.gateway.gateway import gateway
from tests.helpers.models.tool_models import hermes_tokenizer, saved
from tests.helpers.scheduler.scheduler_world import world

TEXTS = st.one_of(st.text(max_size=20), st.sampled_from(["", "\ud800", "\x00", "user", "toy", "Hello", "a" * 5000]))
NUMBERS = st.one_of(
    st.integers(-2, 9), st.sampled_from([2**31, 2**32, 2**63, 2**64, -(2**65), 0.5, -0.0, 1e308, 1e-320, 10**400])
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)
PARTS = st.lists(st.one_of(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), ANYTHING), max_size=3)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system", "refused"]), "content": st.one_of(TEXTS, PARTS)}
        ),
        ANYTHING,
    ),
    max_size=4,
)
PROMPTS = st.one_of(
    TEXTS,
    st.lists(TEXTS, max_size=3),
    st.lists(st.integers(-1, 600), max_size=5),
    st.lists(st.lists(st.integers(0, 511), max_size=3), max_size=3),
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "a b", ""])},
    optional={"parameters": st.one_of(st.just({"type": "object"}), ANYTHING), "strict": SCALARS, "description": TEXTS},
)
TOOLS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS}),
        FUNCTIONS.map(lambda function: {"type": "function", **function}),
        st.fixed_dictionaries({"name": st.just("f"), "input_schema": st.one_of(st.just({"type": "object"}), ANYTHING)}),
        ANYTHING,
    ),
    max_size=3,
)
CHOICES = st.one_of(
    st.sampled_from(["auto", "none", "required"]),
    st.fixed_dictionaries({"type": st.sampled_from(["function", "auto", "any", "tool", "allowed_tools"])}),
    st.just({"type": "function", "function": {"name": "f"}}),
    ANYTHING,
)
LIKELY = {
    "tools": TOOLS,
    "tool_choice": CHOICES,
    "thinking": st.one_of(st.fixed_dictionaries({"type": st.one_of(st.just("enabled"), ANYTHING)}), ANYTHING),
    "reasoning": st.one_of(st.fixed_dictionaries({"effort": SCALARS}), ANYTHING),
    "messages": MESSAGES,
    "prompt": PROMPTS,
    "input": st.one_of(TEXTS, MESSAGES),
    "system": st.one_of(TEXTS, PARTS),
}
RIGHT = {
    "prompt": "Hello",
    "input": "Hello",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 4,
    "tokens": [5],
    "lora_name": "a",
    "lora_path": "/none",
}


@st.composite
def requests(draw):
    """A path, and a body that is right but for a few fields."""
    path = draw(st.sampled_from(sorted(APIS)))
    table = APIS[path]
    body = {name: RIGHT[name] for name in REQUIRED.get(path, ())}
    for name in draw(st.lists(st.sampled_from(sorted(table)), max_size=4, unique=True)):
        body[name] = draw(LIKELY.get(name, ANYTHING))
    if draw(st.integers(0, 9)) == 0:
        body[draw(TEXTS)] = draw(ANYTHING)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int) and body[name] > 9:
            body[name] = 9
    return path, body


class Door:
    """A scheduler and a gateway on a thread's event loop, for tests that hypothesis runs again and again."""

    def __init__(self, tokenizer_folder, admin_key_file):
        self.loop = LoopThread.shared()
        self._world, self.w = self._open(world(tokenizer=tokenizer_folder))
        self._gateway, self.g = self._open(gateway(self.w.target, http_admin_key_file=admin_key_file))

    def _open(self, context):
        return context, self.loop.run(context.__aenter__())

    def close(self):
        for each in (self._gateway, self._world):
            self.loop.run(each.__aexit__(None, None, None))

    async def free(self):
        """Wait until nothing runs any more, in the gateway nor in the scheduler."""
        counts, link = self.g.state.counts, self.g.state.link
        await self.w.until(lambda: counts.num_running == 0 and link.num_requests == 0)
        await self.w.idle()

    async def ask(self, method, path, data):
        """Send a body, and return the status; raises AssertionError for an answer of a failure."""
        headers = {"Authorization": "Bearer root"}
        async with asyncio.timeout(20), self.g.http.request(method, path, data=data, headers=headers) as response:
            text = await response.text()
            shown = data if data is None else data[:300]
            assert response.status < 500 or response.status == 501, (path, shown, text)
            if response.status == 200 and response.content_type == "text/event-stream":
                assert text.rstrip().endswith(("[DONE]", "}")), text
            elif response.status >= 400 and method != "HEAD":
                assert "error" in json.loads(text), (path, text)
            return response.status


@pytest.fixture(scope="module")
def door(tmp_path_factory):
    folder = tmp_path_factory.mktemp("door")
    saved(hermes_tokenizer(), folder / "tokenizer")
    (folder / "admin").write_text("root\n")
    it = Door(str(folder / "tokenizer"), str(folder / "admin"))
    yield it
    it.close()


@pytest.fixture
def no_error_is_logged(caplog):
    yield
    records = [*caplog.get_records("call"), *caplog.records]
    ours = [each for each in records if each.name != "asyncio"]  # gRPC's poller may say that it was early
    assert not [each.getMessage() for each in ours if each.levelname == "ERROR"]


@pytest.mark.slow
def test_no_body_makes_the_gateway_fail_or_leaves_a_request_behind(door, no_error_is_logged):
    statuses = set()

    async def ask(path, body):
        statuses.add(await door.ask("POST", path, json.dumps(body)))
        await door.free()

    @settings(max_examples=100, suppress_health_check=list(HealthCheck))
    @given(requests())
    def run(case):
        door.loop.run(ask(*case))

    run()
    assert {200, 400} <= statuses


DEEP = json.loads("[" * 400 + "]" * 400)
OF_EACH_TYPE = (True, 7, -(2**63), 10**400, 0.5, "text", "\ud800", ["text", 7, None], {"type": "text", "a": {}}, DEEP)


@pytest.mark.slow
def test_no_type_of_any_field_makes_the_gateway_fail(door, no_error_is_logged):
    """Each field of each API with a value of each type, some of them at a time."""
    bodies = []
    for path, table in APIS.items():
        base = {name: RIGHT[name] for name in REQUIRED.get(path, ())}
        base |= {name: 2 for name in ("max_tokens", "max_output_tokens") if name in table}
        bodies += [(path, json.dumps({**base, name: value})) for name in table for value in OF_EACH_TYPE]

    async def ask_all():
        turns = asyncio.Semaphore(32)

        async def ask(path, body):
            async with turns:
                return await door.ask("POST", path, body)

        found = await asyncio.gather(*(ask(*each) for each in bodies), return_exceptions=True)
        await door.free()
        return found

    found = door.loop.run(ask_all())
    assert [each for each in found if isinstance(each, Exception)] == []
    assert {200, 400} <= set(found)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_every_path_answers_every_method(door, no_error_is_logged, method):
    for path in door.g.paths:
        path = path.replace("{name}", "%00%2e%2e%2f\u00e9")
        if (method, path) in {("GET", "/health"), ("HEAD", "/health")}:
            continue  # 503 while the scheduler starts
        status = door.loop.run(door.ask(method, path, b"\x00{" if method not in ("GET", "HEAD") else None))
        assert status != 500, path
    door.loop.run(door.free())


BODY = json.dumps({"model": "toy", "prompt": [5, 6, 7], "max_tokens": 40, "stream": True, "logprobs": 2}).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
WHOLE = HEAD % len(BODY) + BODY
_PATIENCE_S = 0.03
PIECES = st.sampled_from(
    [
        b"",
        b"\x00",
        b"\r\n",
        b"{",
        b"[" * 3000,
        b"9" * 5000,
        b"\xff\xfe",
        b'"',
        b"Transfer-Encoding: chunked\r\n",
        b"1e999",
    ]
)


@st.composite
def damaged(draw):
    """A request of which a part is missing, doubled or replaced, and how much is read before the connection is cut."""
    begin = draw(st.integers(0, len(WHOLE)))
    end = min(len(WHOLE), begin + draw(st.integers(0, 40)))
    piece = draw(st.one_of(PIECES, st.just(WHOLE[begin:end] * 2), st.binary(max_size=4)))
    whole = draw(st.sampled_from([WHOLE[:begin] + piece + WHOLE[end:], WHOLE[:begin], WHOLE]))
    return whole, draw(st.sampled_from([0, 1, 200]))


@contextlib.asynccontextmanager
async def connected(door):
    """A bare connection, cut at the end."""
    host, port = parse_address(door.g.address, default_port=0)
    reader, writer = await asyncio.open_connection(host, port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@pytest.mark.slow
def test_no_damaged_request_and_no_cut_connection_leaves_anything_behind(door, no_error_is_logged):
    async def send(data, num_read):
        async with connected(door) as (reader, writer):
            writer.write(data)
            with contextlib.suppress(ConnectionError, TimeoutError):  # the server may wait for the rest
                await writer.drain()
                async with asyncio.timeout(_PATIENCE_S):
                    answer = await reader.read(num_read) if num_read else b""
                    assert not answer.startswith(b"HTTP/1.1 5"), (data, answer)
        await door.free()

    @settings(max_examples=100, suppress_health_check=list(HealthCheck))
    @given(damaged())
    @example((WHOLE, 1))
    @example((WHOLE, 0))
    @example((WHOLE[:-9], 0))
    def run(case):
        door.loop.run(send(*case))

    run()


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["no HTTP", "version", "long path", "long header", "negative length", "two lengths", "chunk"],
)
def test_what_is_no_request_is_400_and_the_end_of_the_connection(door, no_error_is_logged, data):
    async def send():
        async with connected(door) as (reader, writer), asyncio.timeout(20):
            writer.write(data)
            return await reader.read()

    assert door.loop.run(send()).startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
