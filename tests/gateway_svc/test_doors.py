"""Who may call, how much, and what the gateway says of itself."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import zlib

import pytest

from cadenza import __version__
from cadenza.errors import OptionError
from cadenza.healthcheck import check
from cadenza.v1 import admin_pb2, admin_pb2_grpc
from gateway_svc.app import make_state
from gateway_svc.config import GatewayConfig
from tests.helpers.gateway.gateway import gateway
from tests.helpers.scheduler.scheduler_world import world
from tests.helpers.scheduler.scripted_executor import VOCAB_SIZE
from tests.helpers.tenants import token, write_tenants

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


async def test_health_follows_the_scheduler_and_its_executor(w, g):
    await w.until(lambda: g.state.link.is_serving)
    async with g.http.get("/health") as response:
        assert response.status == 200
    assert await g.get("/version") == {"version": __version__}
    w.executor.refuse = None
    await w.service.stop()
    await w.until(lambda: not g.state.link.is_serving)
    error = (await g.get("/health", 503))["error"]
    assert error["type"] == "service_unavailable_error"
    assert error["message"] == f"the scheduler at {w.target} does not serve: it is away"


async def test_why_a_scheduler_does_not_serve_is_said(w, g, monkeypatch, caplog):
    """In its own words: a full disk is no scheduler that is away. The log says it once, however often probes ask."""
    await w.until(lambda: g.state.link.is_serving)
    monkeypatch.setattr(w.engine.journal, "problem", "the journal cannot be written (database or disk is full)")
    w.engine.report_health()
    await w.until(lambda: not g.state.link.is_serving)
    why = f"the scheduler at {w.target} does not serve: the journal cannot be written (database or disk is full)"
    assert (await g.get("/health", 503))["error"]["message"] == why
    await w.until(lambda: why in caplog.messages)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [why]
    g.state.link._unserved_since = time.monotonic() - 60
    assert (await g.post(CHAT, HELLO, 503))["error"]["message"] == why
    assert await asyncio.to_thread(check, w.target) == (
        "NOT_SERVING: the journal cannot be written (database or disk is full)"
    )
    monkeypatch.undo()
    await admin_pb2_grpc.AdminServiceStub(w.channel).Drain(admin_pb2.DrainRequest())
    assert (await g.get("/health", 503))["error"]["message"].endswith("does not serve: it is draining")


async def test_without_a_scheduler_there_is_503_at_once():
    async with gateway("127.0.0.1:9") as g:
        error = await g.post(CHAT, HELLO, 503)
        assert error["error"]["type"] == "service_unavailable_error"
        async with g.http.post("/v1/messages", json={**HELLO, "max_tokens": 1}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["type"] == "overloaded_error"


async def test_models_are_named_as_clients_know_them(w, g):
    models = await g.get("/v1/models")
    assert [model["id"] for model in models["data"]] == ["toy"]
    assert models["data"][0]["max_model_len"] == 256
    assert models["data"][0]["meta"] == {"n_vocab": VOCAB_SIZE}
    assert (await g.get("/v1/models/toy"))["id"] == "toy"
    assert (await g.get("/v1/models/other", 404))["error"]["code"] == "model_not_found"
    error = (await g.post(CHAT, {**HELLO, "model": "other"}, 404))["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "the served one is 'toy'" in error["message"]
    async with gateway(w.target, served_model_name=["a", "b"]) as named:
        assert [model["id"] for model in (await named.get("/v1/models"))["data"]] == ["a", "b"]
        assert (await named.post(CHAT, {**HELLO, "model": "b"}))["model"] == "b"
        await named.post(CHAT, {**HELLO, "model": "toy"}, 404)


async def test_metrics_are_the_gateways_and_the_schedulers(w, g):
    await g.post(CHAT, HELLO)
    await g.post(CHAT, {}, 400)
    async with g.http.get("/metrics") as response:
        text = await response.text()
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert f'cadenza_gateway_requests_total{{path="{CHAT}",status="200"}} 1.0' in text
    assert f'cadenza_gateway_requests_total{{path="{CHAT}",status="400"}} 1.0' in text
    assert "vllm:num_requests_running" in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    async with g.http.head("/metrics") as response:
        assert response.status == 200
        assert await response.read() == b""


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/openai/v1/models/", "did you mean /v1/models?"),
        ("/v1/tokenize", "did you mean /tokenize?"),
        ("/v1//chat/completions", "did you mean /v1/chat/completions?"),
        ("/V1/Models", "did you mean /v1/models?"),
        ("/completion", "/openapi.json has the paths that there are"),
        ("/", "/openapi.json has the paths that there are"),
    ],
)
async def test_an_unknown_path_is_answered_with_the_one_that_is_meant(g, path, hint):
    assert (await g.post(path, {}, 404))["error"]["message"] == f"there is no {path}; {hint}"


async def test_a_path_with_a_slash_too_many_is_sent_to_the_one_without(g):
    assert (await g.post("/v1/chat/completions/?a=b%20c", HELLO))["object"] == "chat.completion"
    asked = g.http.post("/v1/chat/completions/?a=b%20c", json=HELLO, allow_redirects=False)
    async with asked as response:
        assert (response.status, response.headers["Location"]) == (307, "/v1/chat/completions?a=b%20c")
        assert "did you mean /v1/chat/completions?" in (await response.json())["error"]["message"]
    for path in ("/", "/v1/", "/v1/nothing/"):
        async with g.http.get(path, allow_redirects=False) as response:
            assert (response.status, response.headers.get("Location")) == (404, None), path


async def test_unknown_paths_and_methods_have_the_apis_errors(g):
    assert (await g.post("/v1/nothing", {}, 404))["error"]["type"] == "not_found_error"
    async with g.http.get(CHAT) as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert "error" in await response.json()
    assert (await g.post("/v1/embeddings", {"input": "a"}, 400))["error"]["code"] == "unsupported"
    assert (await g.post("/v1/load_lora_adapter", {}, 404))["error"]["code"] == "unknown_path"


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"n": NaN}', b'{"n": ' + b"9" * 5000 + b"}"]
)
async def test_a_body_that_is_no_json_object_is_refused(g, body):
    assert (await g.post(CHAT, body, 400))["error"]["type"] == "invalid_request_error"


def _deflated(body):
    maker = zlib.compressobj(wbits=-15)
    return maker.compress(body) + maker.flush()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "encode"),
    [("gzip", gzip.compress), ("X-GZIP", gzip.compress), ("deflate", zlib.compress), ("deflate", _deflated)],
)
async def test_a_body_may_be_compressed(g, encoding, encode):
    """A long one is read in a thread, however short it was under way."""
    for more in ({}, {"user": "a" * 200_000}):
        body = encode(json.dumps({**HELLO, **more}).encode())
        await g.post(CHAT, body, Content_Encoding=encoding)
        error = (await g.post(CHAT, body[:-5], 400, Content_Encoding=encoding))["error"]
        assert "Content-Encoding" in error["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_is_not_encoded_as_it_says_is_the_clients_error(g, caplog, encoding):
    async with g.http.post(CHAT, data=b'{"messages": []}', headers={"Content-Encoding": encoding}) as response:
        assert response.status == 400
        assert "Content-Encoding" in (await response.json())["error"]["message"]
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "\u00e9"])
async def test_an_encoding_that_is_not_known_is_refused_in_the_apis_shape(g, encoding):
    for path in (CHAT, "/v1/messages"):
        async with g.http.post(path, data=b"a", headers={"Content-Encoding": encoding}) as response:
            assert (response.status, response.headers["Accept-Encoding"]) == (415, "gzip, deflate")
            error = (await response.json())["error"]
            assert error["type"] == "invalid_request_error"
            assert "Content-Encoding" in error["message"]
        async with g.http.post(path, json=HELLO) as response:
            assert response.status == 200, "the connection goes on"


@pytest.mark.parametrize(
    ("path", "name"),
    [("/v1/completions", "prompt"), (CHAT, "messages"), ("/v1/responses", "input"), ("/v1/messages", "messages")],
)
async def test_a_prompt_over_the_models_length_is_said_in_the_words_that_agents_know(g, path, name):
    text = "a" * 300
    value = [{"role": "user", "content": text}] if name == "messages" else text
    error = (await g.post(path, {name: value, **({"max_tokens": 1} if path == "/v1/messages" else {})}, 400))["error"]
    assert "prompt is too long: this model's maximum context length is 256 tokens" in error["message"]
    if path != "/v1/messages":
        assert (error["param"], error["code"]) == (name, "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "name", "part"),
    [
        (CHAT, "messages", {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
        ("/v1/responses", "input", {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}),
        ("/v1/messages", "messages", {"type": "image", "source": {"type": "base64", "data": "AAAA"}}),
    ],
)
async def test_pictures_are_refused_by_their_type_alone(g, path, name, part):
    body = {name: [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}], "max_tokens": 1}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
        body["input"][0]["content"][0]["type"] = "input_text"
    message = (await g.post(path, body, 400))["error"]["message"]
    assert part["type"] in message
    assert "AAAA" not in message


async def test_limits_of_bodies_heads_and_requests(w, tokenizer_folder):
    async with gateway(w.target, http_max_body_mb=0.01, http_max_requests=1) as g:
        large = {"messages": [{"role": "user", "content": "a" * 20_000}]}
        assert "http-max-body-mb" in (await g.post(CHAT, large, 413))["error"]["message"]
        bomb = zlib.compress(json.dumps({"messages": [], "user": "a" * 10_000_000}).encode())
        assert len(bomb) < 20_000
        async with g.http.post(CHAT, data=bomb, headers={"Content-Encoding": "deflate"}) as response:
            assert response.status == 413
        async with g.http.get("/version", headers={"X-Long": "a" * 20_000}) as response:
            assert response.status == 400
        w.executor.going.clear()
        running = asyncio.create_task(g.post(CHAT, HELLO))
        await w.until(lambda: w.engine._live)
        async with g.http.post(CHAT, json=HELLO) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
        w.executor.going.set()
        await running


@pytest.mark.slow
async def test_a_prompt_that_no_message_can_hold_is_413(g):
    for prompt in ("a" * 1_600_000, [511] * 800_000):
        assert "bytes" in (await g.post("/v1/completions", {"prompt": prompt}, 413))["error"]["message"]


async def test_a_full_queue_is_429_with_the_time_to_wait(tokenizer_folder):
    async with world(tokenizer=tokenizer_folder, max_queued_requests=1) as w, gateway(w.target) as g:
        w.executor.max_num_seqs = 1
        w.executor.going.clear()
        tasks = [asyncio.create_task(g.http.post(CHAT, json=HELLO)) for _ in range(100)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        response = done.pop().result()
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["type"] == "rate_limit_error"
        w.executor.going.set()
        statuses = {each.status for each in await asyncio.gather(*tasks)}
        assert statuses == {200, 429}
        for each in tasks:
            each.result().release()


async def test_keys_of_a_file_are_needed_and_read_again(w, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the team\nsecret\n")
    async with gateway(w.target, http_api_key_file=str(file)) as g:
        await g.post(CHAT, HELLO, key="secret")
        await g.post("/v1/messages", HELLO, x_api_key="secret")
        assert (await g.post(CHAT, HELLO, 401))["error"]["type"] == "authentication_error"
        await g.post(CHAT, HELLO, 401, key="secret2")
        await g.get("/metrics", 401)
        file.write_text("other\nthird\n")
        await g.post(CHAT, HELLO, 401, key="secret")
        await g.post(CHAT, HELLO, key="third")
        async with g.http.get("/health") as response:
            assert response.status in (200, 503), "needs no key"


def test_files_of_keys_are_checked_at_the_start(tmp_path):
    (tmp_path / "empty").write_text("\n")
    for path in (tmp_path / "missing", tmp_path / "empty"):
        with pytest.raises(OptionError, match="http-api-key-file"):
            make_state(GatewayConfig(http_api_key_file=str(path)))


async def test_a_session_with_requests_is_kept_however_many_keys_there_are(tmp_path, tokenizer_folder, monkeypatch):
    monkeypatch.setattr("gateway_svc.scheduler.link._MAX_CALLERS", 1)
    tenants = write_tenants(tmp_path / "tenants.toml", {"gold": {}, "free": {}})
    async with world(tokenizer=tokenizer_folder, tenants=tenants) as w, gateway(w.target) as g:
        w.executor.going.clear()
        running = asyncio.create_task(g.post(CHAT, HELLO, key=token("gold")))
        await w.until(lambda: g.state.link.num_requests == 1)
        others = [asyncio.create_task(g.post(CHAT, HELLO, key=token("free"))) for _ in range(2)]
        await w.until(lambda: g.state.link.num_requests == 3)
        w.executor.going.set()
        await asyncio.gather(running, *others)


async def test_keys_are_the_tenants_tokens(tmp_path, tokenizer_folder):
    file = tmp_path / "tenants.toml"
    tenants = write_tenants(file, {"gold": {}, "free": {"max_requests": 1}, "ops": {"admin": True}})
    (tmp_path / "own").write_text(token("ops"))
    (tmp_path / "admin").write_text("admins")
    async with (
        world(tokenizer=tokenizer_folder, tenants=tenants) as w,
        gateway(w.target, http_token_file=str(tmp_path / "own"), http_admin_key_file=str(tmp_path / "admin")) as g,
    ):
        for key in ("gold", "free"):
            await g.post(CHAT, HELLO, key=token(key))
        assert (await g.post(CHAT, HELLO, 401))["error"]["code"] == "invalid_api_key"
        await g.post(CHAT, HELLO, 401, key="nobody's")
        await g.post(CHAT, HELLO, 401, key="not printable \u20ac".encode().decode("latin-1"))
        assert (await g.post("/v1/messages", HELLO, 401, x_api_key="x"))["error"]["type"] == "authentication_error"
        assert [model["id"] for model in (await g.get("/v1/models", key=token("gold")))["data"]] == ["toy"]
        assert set(g.state.link._callers) == {token("gold"), token("free")}, "no session for keys that nobody has"
        async with g.http.get("/metrics") as response:
            assert "tenant=" not in await response.text(), "the gateway's token is not everybody's"
        async with g.http.get("/metrics", headers={"Authorization": "Bearer admins"}) as response:
            assert 'tenant="gold"' in await response.text()
        w.executor.going.clear()
        running = asyncio.create_task(g.post(CHAT, HELLO, key=token("free")))
        await w.until(lambda: w.engine._live)
        error = (await g.post(CHAT, HELLO, 429, key=token("free")))["error"]
        assert "max_requests" in error["message"]
        w.executor.going.set()
        await running
        write_tenants(file, {"free": {}, "ops": {"admin": True}})
        w.service.reload_tenants()
        await g.post(CHAT, HELLO, 401, key=token("gold"))
        await g.post(CHAT, HELLO, key=token("free"))


async def test_browsers_may_call_only_from_given_origins(w, g):
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with g.http.options(CHAT, headers=asked) as response:
        assert response.status == 403
        assert "Access-Control-Allow-Origin" not in response.headers
    async with g.http.options(CHAT) as response:  # no browser's question: there is no page
        assert (response.status, response.headers["Allow"]) == (405, "POST")
    async with gateway(w.target, http_cors_origin=["https://a.example"]) as open_one:
        asked["Access-Control-Request-Headers"] = "authorization"
        async with open_one.http.options(CHAT, headers=asked) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
            assert response.headers["Access-Control-Allow-Headers"] == "authorization"
        for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            async with open_one.http.post(CHAT, json={**HELLO, "stream": True}, headers={"Origin": origin}) as response:
                assert response.headers.get("Access-Control-Allow-Origin") == allowed


async def test_request_ids_come_back(g):
    async with g.http.post(CHAT, json={**HELLO, "request_id": "mine"}, headers={"X-Request-ID": "theirs"}) as response:
        assert response.headers["X-Request-ID"] == "theirs"
        assert (await response.json())["id"] == "chatcmpl-mine"
        assert "request-id" not in response.headers
    async with g.http.post("/v1/messages", json=HELLO, headers={"X-Request-ID": "theirs"}) as response:
        assert response.headers["request-id"] == response.headers["X-Request-ID"] == "theirs"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"http": "0.0.0.0:0"}, "beyond loopback"),
        ({"target": "a b"}, "HOST:PORT"),
        ({"http_max_body_mb": 0}, "greater than 0"),
    ],
)
def test_wrong_options_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        GatewayConfig(**options)


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({}, {"http": ("127.0.0.1", 8000)}),
        ({"kserve": "0"}, {"kserve": ("127.0.0.1", 0)}),
        ({"kv_events_endpoint": "ipc:///tmp/kv"}, {}),
        ({"kv_events_endpoint": "ipc:///tmp/kv", "page": True}, {"http": ("127.0.0.1", 8000)}),
        ({"vllm_grpc": "127.0.0.1:1", "http": "2"}, {"http": ("127.0.0.1", 2), "vllm_grpc": ("127.0.0.1", 1)}),
        ({"kserve": "0", "page": True}, {"http": ("127.0.0.1", 8000), "kserve": ("127.0.0.1", 0)}),
    ],
)
def test_http_is_served_without_other_listeners_and_for_the_page(options, places):
    assert list(GatewayConfig(**options).listeners.items()) == list(places.items()), "HTTP first"


def test_keys_are_not_sent_to_other_machines_in_plain_text():
    with pytest.raises(OptionError, match="API keys are not sent"):
        make_state(GatewayConfig(target="192.0.2.1:50051"))
