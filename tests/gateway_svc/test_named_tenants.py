"""A gateway whose token may name tenants: one session carries the requests of all keys, each of its own tenant."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.helpers.gateway.gateway import gateway
from tests.helpers.scheduler.scheduler_world import world
from tests.helpers.tenants import token, write_tenants

PATH = "/v1/completions"
BODY = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
TENANTS = {"gold": {}, "free": {"max_requests": 1}, "gateway": {"may_name_tenants": True}}


@pytest.fixture
def file(tmp_path):
    (tmp_path / "own").write_text(token("gateway"))
    return tmp_path / "tenants.toml"


@pytest.fixture
async def w(file, tokenizer_folder):
    async with world(tokenizer=tokenizer_folder, tenants=write_tenants(file, TENANTS)) as it:
        yield it


@pytest.fixture
async def g(w, file):
    async with gateway(w.target, http_token_file=str(file.with_name("own"))) as it:
        yield it


async def running(w, g, *names):
    """Requests of these tenants, held until the executor goes on."""
    w.executor.going.clear()
    count = len(w.engine._live) + len(names)
    tasks = [asyncio.create_task(g.post(PATH, BODY, key=token(name))) for name in names]
    await w.until(lambda: len(w.engine._live) == count)
    return tasks


async def test_what_needs_no_key_names_neither_models_nor_tenants(w, g, caplog):
    """Also after requests, of which metrics count, and when the gateway has a token of its own."""
    with caplog.at_level(logging.INFO):
        await g.post(PATH, BODY, key=token("gold"))
    (said,) = [record.message for record in caplog.records if "need none" in record.message]
    model = (await g.get("/v1/models", key=token("gold")))["data"][0]
    for path in ("/health", "/version", "/openapi.json", "/metrics"):
        assert path in said
        async with g.http.get(path) as response:
            text = await response.text()
            assert response.status == 200, path
            assert not [word for word in (model["id"], model["root"], "vllm:", *TENANTS) if f'"{word}' in text], path
    for path in ("/v1/models", f"/v1/models/{model['id']}"):
        async with g.http.get(path) as response:
            assert response.status == 401
            assert model["root"] not in (await response.text()).replace(path, "")


async def test_one_session_carries_the_requests_of_all_keys(w, g):
    tasks = await running(w, g, "gold", "free", "gold")
    assert w.service._front.num_streams == 1
    assert sorted(tenant for tenant, _ in w.engine._live) == ["free", "gold", "gold"]
    error = (await g.post(PATH, BODY, 429, key=token("free")))["error"]
    assert "max_requests" in error["message"]
    assert g.state.link.num_requests == 3
    w.executor.going.set()
    await asyncio.gather(*tasks)
    assert g.state.link.num_requests == 0
    await w.idle()


async def test_a_client_that_leaves_ends_its_own_request(w, g):
    gold, free = await running(w, g, "gold", "free")
    gold.cancel()
    await w.until(lambda: [tenant for tenant, _ in w.engine._live] == ["free"])
    w.executor.going.set()
    await free
    await w.idle()


async def test_unknown_and_revoked_keys_are_refused(w, g, file):
    for key in ("nobody's", "x" * 600):
        await g.post(PATH, BODY, 401, key=key)
    await g.post(PATH, BODY, 401)
    await g.post(PATH, BODY, key=token("gold"))
    write_tenants(file, {"free": {}, "gateway": {"may_name_tenants": True}})
    w.service.reload_tenants()
    assert (await g.post(PATH, BODY, 401, key=token("gold")))["error"]["code"] == "invalid_api_key"
    await g.post(PATH, BODY, key=token("free"))


async def test_without_the_right_each_key_has_its_own_session(w, file):
    file.with_name("own").write_text(token("free"))
    async with gateway(w.target, http_token_file=str(file.with_name("own"))) as g:
        tasks = await running(w, g, "gold", "free")
        assert w.service._front.num_streams == 2
        w.executor.going.set()
        await asyncio.gather(*tasks)


async def test_a_gateway_whose_token_is_unknown_serves_its_clients_with_theirs(w, file):
    file.with_name("own").write_text("nobody's")
    async with gateway(w.target, http_token_file=str(file.with_name("own"))) as g:
        await g.post(PATH, BODY, key=token("gold"))
        await g.post(PATH, BODY, 401, key="nobody's")


@pytest.mark.parametrize("lost", [{"gateway": {}}, {}], ids=["right", "token"])
async def test_a_right_that_is_lost_while_the_stream_lives_is_noticed(w, g, file, lost):
    """Requests that run go on; a new one runs in a session of its own key, and so do all that follow."""
    (old,) = await running(w, g, "gold")
    assert w.service._front.num_streams == 1
    write_tenants(file, {"gold": {}, "free": {}, **lost})
    w.service.reload_tenants()
    (new,) = await running(w, g, "free")
    assert [tenant for tenant, _ in w.engine._live] == ["gold", "free"]
    (later,) = await running(w, g, "free")
    assert g.state.link._is_shared is False
    assert g.state.link.num_requests == 3
    new.cancel()
    await w.until(lambda: sorted(tenant for tenant, _ in w.engine._live) == ["free", "gold"])
    w.executor.going.set()
    await asyncio.gather(old, later)
    await w.idle()
    await g.post(PATH, BODY, 401, key="nobody's")
