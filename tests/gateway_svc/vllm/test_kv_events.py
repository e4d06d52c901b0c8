"""KV events over gRPC: ours, and the same as routers read them."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from cadenza.v1 import admin_pb2, execution_pb2
from gateway_svc.dialects import smg_common_pb2 as common
from tests.helpers.core.kv_router import Router
from tests.helpers.gateway import vllm_engine
from tests.helpers.gateway.gateway import gateway
from tests.helpers.scheduler.scheduler_world import collect, request, world
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor

BLOCK = 16
FIRST, SECOND = list(range(5, 5 + 3 * BLOCK + 1)), [9] * (2 * BLOCK + 1)


@contextlib.asynccontextmanager
async def subscribed(stub, start=0):
    """A subscription and its router; it is cancelled at the end."""
    call = stub.SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest(start_sequence_number=start))
    yield call, Router()
    call.cancel()


async def follow(call, router, condition):
    """Follow batches until a condition holds."""
    async with asyncio.timeout(10):
        while not condition():
            router.take(await call.read())


async def serve(w, ids, **fields):
    """Run a request."""
    await collect(w.stub.Generate(request(ids=ids, max_tokens=1, **fields)))


@pytest.fixture
async def w(tokenizer_folder):
    async with world(sharing(), tokenizer=tokenizer_folder) as it:
        yield it


def sharing():
    """An executor whose requests may share prefixes."""
    return ScriptedExecutor(features=(execution_pb2.EXECUTOR_FEATURE_SHARED_PREFIXES,))


async def test_a_router_follows_what_is_cached(w):
    await serve(w, FIRST)
    async with subscribed(w.admin) as (call, router):
        await follow(call, router, lambda: router.num_cached(FIRST, BLOCK) == 3 * BLOCK)
        assert router.num_states == 1
        await serve(w, SECOND)
        await follow(call, router, lambda: router.num_cached(SECOND, BLOCK) == 2 * BLOCK)
        assert router.num_cached([*FIRST[:BLOCK], *SECOND], BLOCK) == BLOCK
        last = router.last
    await serve(w, [7] * 40)
    async with subscribed(w.admin, last + 1) as (call, _):
        await follow(call, router, lambda: router.num_cached([7] * 40, BLOCK) == 2 * BLOCK)
        assert router.num_states == 1, "it goes on where it was"


async def test_salts_tell_texts_apart(w):
    async with subscribed(w.admin) as (call, router):
        await serve(w, FIRST)
        await serve(w, FIRST, cache_salt=b"other")
        await follow(call, router, lambda: len(router.blocks) == 6)


async def test_equal_texts_have_equal_hashes_in_two_services(tokenizer_folder, w):
    async with world(sharing(), tokenizer=tokenizer_folder) as other:
        hashes = []
        for each, order in ((w, (FIRST, SECOND)), (other, (SECOND, FIRST))):
            for ids in order:
                await serve(each, ids)
            async with subscribed(each.admin) as (call, router):
                await follow(call, router, lambda router=router: len(router.blocks) == 5)
                hashes.append(set(router.blocks))
        assert hashes[0] == hashes[1]


@contextlib.asynccontextmanager
async def gatewayed(w, **options):
    """A stub of the engine protocol at a gateway."""
    served = gateway(w.target, vllm_grpc="127.0.0.1:0", **options)
    async with served as g, vllm_engine.engine(g.addresses["vllm_grpc"]) as stub:
        yield stub


@pytest.fixture
async def engine(w):
    async with gatewayed(w) as stub:
        yield stub


async def test_a_router_of_vllm_s_protocol_gets_the_same(w, engine):
    await serve(w, FIRST)
    call = engine.SubscribeKvEvents(common.SubscribeKvEventsRequest())
    batch = await call.read()
    assert (batch.snapshot.index, batch.snapshot.count, batch.snapshot.blocks) == (0, 1, 3)
    cleared, stored = batch.events
    assert cleared.WhichOneof("data") == "cleared"
    assert not stored.stored.HasField("parent_block_hash")
    assert [list(block.token_ids) for block in stored.stored.blocks] == [
        FIRST[start : start + BLOCK] for start in range(0, 3 * BLOCK, BLOCK)
    ]
    assert stored.stored.medium == "GPU"
    assert stored.event_id == 0
    longer = [*FIRST[: 3 * BLOCK], *SECOND]
    await serve(w, longer)
    batch_after = await call.read()
    assert batch_after.sequence_number == batch.sequence_number + 1
    (event,) = batch_after.events
    assert event.stored.parent_block_hash == stored.stored.blocks[-1].block_hash
    assert event.event_id
    flushed = await engine.FlushCache(common.FlushCacheRequest())
    assert flushed.success
    gone: set[int] = set()
    while len(gone) < 5:
        for event in (await call.read()).events:
            gone.update(event.removed.block_hashes)
    call.cancel()


async def test_the_cache_is_not_emptied_under_a_request(w, engine):
    w.executor.pause_after = 1
    call = w.stub.Generate(request(ids=FIRST, max_tokens=50, ignore_eos=True))
    await call.read()
    answer = await engine.FlushCache(common.FlushCacheRequest())
    assert not answer.success
    assert "1 requests run or wait" in answer.message
    call.cancel()
    w.executor.pause_after = None
    w.executor.going.set()
    await w.idle()
    assert (await engine.FlushCache(common.FlushCacheRequest(timeout_s=5))).success


async def test_where_clients_need_keys_the_caches_are_for_an_admin_alone(w, tmp_path):
    (tmp_path / "keys").write_text("secret\n")
    (tmp_path / "admin").write_text("admins\n")
    await serve(w, FIRST)
    files = {"http_api_key_file": str(tmp_path / "keys"), "http_admin_key_file": str(tmp_path / "admin")}
    calls = (("SubscribeKvEvents", common.SubscribeKvEventsRequest()), ("FlushCache", common.FlushCacheRequest()))
    async with gatewayed(w, **files) as stub:
        for key, code in (("", "UNAUTHENTICATED"), ("other", "UNAUTHENTICATED"), ("secret", "PERMISSION_DENIED")):
            for name, message in calls:
                call = getattr(stub, name)(message, metadata=(("authorization", f"Bearer {key}"),))
                assert (await call.code()).name == code, (key, name)
        admin = (("authorization", "Bearer admins"),)
        events = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(), metadata=admin)
        assert (await events.read()).snapshot.blocks == 3
        events.cancel()
        assert (await stub.FlushCache(common.FlushCacheRequest(), metadata=admin)).success
    del files["http_admin_key_file"]
    async with gatewayed(w, **files) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="http-admin-key-file"):
            await stub.FlushCache(common.FlushCacheRequest(), metadata=(("authorization", "Bearer secret"),))
