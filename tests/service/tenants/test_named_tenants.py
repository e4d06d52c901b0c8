"""A session whose token may name the tenant of each request: limits, ids, refusals and aborts are that tenant's."""

from __future__ import annotations

import contextlib
import hashlib

import grpc
import pytest

from cadenza.v1 import generation_pb2 as pb
from tests.helpers.scheduler.scheduler_world import request, world
from tests.helpers.tenants import bearer, token, write_tenants

TENANTS = {"gold": {}, "free": {"max_requests": 1}, "gateway": {"may_name_tenants": True}}


def digest(name: str) -> bytes:
    return hashlib.sha256(token(name).encode()).digest()


def message(request_id: str, name: str | None, **fields) -> pb.SessionRequest:
    """A request of a tenant; None: of the session's own."""
    generate = request(ids=[5, 6, 7], request_id=request_id, ignore_eos=True, **fields)
    return pb.SessionRequest(generate=generate, tenant_token_sha256=b"" if name is None else digest(name))


@pytest.fixture
async def w(tmp_path):
    tenants = write_tenants(tmp_path / "tenants.toml", TENANTS)
    async with world(tenants=tenants, skip_tokenizer_init=True) as it:
        yield it


@contextlib.asynccontextmanager
async def session(w, name):
    call = w.stub.Session(metadata=bearer(name))
    yield call
    call.cancel()


async def ends(call, count):
    """The events that end requests, by request id: an error's code, or None."""
    found = {}
    while len(found) < count:
        for event in (await call.read()).events:
            if event.WhichOneof("event") == "error":
                found[event.request_id] = event.error.code
            elif event.done:
                found[event.request_id] = None
    return found


async def test_requests_are_those_of_the_tenants_that_are_named(w):
    w.executor.going.clear()
    async with session(w, "gateway") as call:
        for request_id, name in (("a", "gold"), ("b", "free"), ("c", "free"), ("d", "gold"), ("e", None)):
            await call.write(message(request_id, name))
        await w.until(lambda: len(w.engine._live) == 4)
        assert set(w.engine._live) == {("gold", "a"), ("free", "b"), ("gold", "d"), ("gateway", "e")}
        w.executor.going.set()
        found = await ends(call, 5)
    assert found.pop("c") == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "free has one request at a time"
    assert set(found.values()) == {None}
    await w.idle()


async def test_a_wrong_name_ends_its_request_alone(w):
    async with session(w, "gateway") as call:
        for wrong in (b"x", bytes(32), hashlib.sha256(b"other").digest()):
            bad = message(f"bad-{len(wrong)}-{wrong[:1].hex()}", None)
            bad.tenant_token_sha256 = wrong
            await call.write(bad)
        await call.write(message("good", "gold"))
        found = await ends(call, 4)
    assert found.pop("good") is None
    assert set(found.values()) == {grpc.StatusCode.UNAUTHENTICATED.value[0]}


@pytest.mark.parametrize("own", ["gold", "free"])
async def test_without_the_right_nobody_else_is_named(w, own):
    async with session(w, own) as call:
        await call.write(message("other", "gateway"))
        await call.write(message("own", own))
        found = await ends(call, 2)
    assert found == {"other": grpc.StatusCode.PERMISSION_DENIED.value[0], "own": None}


async def test_without_the_right_no_abort_names_anybody_else(w):
    w.executor.going.clear()
    async with session(w, "gold") as call:
        await call.write(message("own", None))
        await call.write(pb.SessionRequest(abort=pb.AbortRequest(request_id="x"), tenant_token_sha256=digest("free")))
        event = (await call.read()).events[0]
        assert (event.request_id, event.error.code) == ("", grpc.StatusCode.PERMISSION_DENIED.value[0])
        w.executor.going.set()
        assert await ends(call, 1) == {"own": None}


async def test_an_id_in_use_by_one_tenant_is_not_another_ones_in_the_same_session(w):
    w.executor.going.clear()
    async with session(w, "gateway") as call:
        await call.write(message("a", "gold"))
        await w.until(lambda: w.engine._live)
        await call.write(message("a", "free"))
        await call.write(pb.SessionRequest(abort=pb.AbortRequest(request_id="a"), tenant_token_sha256=digest("free")))
        event = (await call.read()).events[0]
        assert (event.error.code, event.done) == (grpc.StatusCode.ALREADY_EXISTS.value[0], False)
        assert w.engine.find("gold", "a") is not None, "another tenant's abort does not reach it"
        await call.write(pb.SessionRequest(abort=pb.AbortRequest(request_id="a"), tenant_token_sha256=digest("gold")))
        w.executor.going.set()
        await ends(call, 1)
    await w.idle()


async def test_a_revoked_token_may_abort_what_it_began(w, tmp_path):
    w.executor.going.clear()
    async with session(w, "gateway") as call:
        await call.write(message("a", "gold"))
        await w.until(lambda: w.engine.find("gold", "a") is not None)
        write_tenants(tmp_path / "tenants.toml", TENANTS | {"gold": {"tokens": [1]}})
        w.service.reload_tenants()
        await call.write(pb.SessionRequest(abort=pb.AbortRequest(request_id="a"), tenant_token_sha256=digest("gold")))
        await w.until(lambda: w.engine.find("gold", "a") is None)
    w.executor.going.set()
    await w.idle()


async def test_the_server_says_who_may(w):
    for name, may in (("gateway", True), ("gold", False)):
        info = await w.stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=bearer(name))
        assert info.may_name_tenants is may
