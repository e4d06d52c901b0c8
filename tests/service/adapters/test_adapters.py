"""LoRA adapters through both services, with the simulated executor, whose tokens depend on an adapter's content."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cadenza import AsyncClient, RequestOutput, SamplingParams
from cadenza.errors import CadenzaError, FailedPreconditionError, InvalidRequestError, NotFoundError
from cadenza.v1 import admin_pb2
from cadenza.v1.admin_pb2_grpc import AdminServiceStub
from tests.helpers.executor.simulated_adapters import content_hash, greedy_tokens, make_adapter
from tests.helpers.services import Running, cadenza_services, executor_service, scheduler_service

NUM_TOKENS = 20
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9] * 8


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Six adapters: a to e differ, f has the content of a."""
    contents = {name: name.encode() for name in "abcde"} | {"f": b"a"}
    return {name: make_adapter(tmp_path / name, content) for name, content in contents.items()}


def options(folders: dict[str, Path], **more: Any) -> dict[str, Any]:
    return {"lora": [f"{name}={folder}" for name, folder in folders.items()], **more}


@asynccontextmanager
async def serving(folders: dict[str, Path], **scheduler: Any) -> AsyncIterator[tuple[Running, AsyncClient]]:
    async with (
        cadenza_services("simulated", simulate="instant", scheduler=options(folders, **scheduler)) as running,
        AsyncClient(running.target) as client,
    ):
        yield running, client


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


async def test_adapters_and_none_share_batches_and_each_request_gets_its_own(folders: dict[str, Path]) -> None:
    names = [*folders, None] * 6
    async with serving(folders, max_loras=2) as (_, client):
        prompts = [[index, *PROMPT] for index in range(len(names))]
        outputs = await client.generate(prompts, PARAMS, adapter=names)
    for prompt, name, found in zip(prompts, names, tokens(outputs), strict=True):
        assert found == greedy_tokens(prompt, NUM_TOKENS, folders[name] if name else None)
    assert len({tuple(each) for each in tokens(outputs)}) == len(names)


async def test_more_adapters_than_an_executor_holds(folders: dict[str, Path]) -> None:
    names = list(folders) * 3
    async with serving(folders, max_loras=1, max_cpu_loras=1) as (_, client):
        outputs = await client.generate([PROMPT] * len(names), PARAMS, adapter=names)
    assert tokens(outputs) == [greedy_tokens(PROMPT, NUM_TOKENS, folders[name]) for name in names]


async def kv_hashes(running: Running, num_blocks: int) -> dict[str, set[int]]:
    """The hashes of what is cached, by the adapter's name in KV events; waits for so many blocks."""
    hashes: dict[str, set[int]] = {}
    async with grpc.aio.insecure_channel(running.target) as channel:
        events = AdminServiceStub(channel).SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest())
        async with asyncio.timeout(10):
            while sum(map(len, hashes.values())) < num_blocks:
                for event in (await events.read()).events:
                    hashes.setdefault(event.stored.adapter, set()).update(event.stored.block_hashes)
        events.cancel()
    return hashes


async def test_kv_events_tell_adapters_apart_and_are_equal_in_two_services(folders: dict[str, Path]) -> None:
    differing = {name: folders[name] for name in "abc"}
    seen = []
    for names in (("a", "b", None), (None, "b", "a")):
        async with serving(differing) as (running, client):
            await client.generate([PROMPT] * len(names), SamplingParams(max_tokens=1), adapter=list(names))
            seen.append(await kv_hashes(running, 3 * (len(PROMPT) // 16)))
    assert seen[0] == seen[1]
    assert seen[0].keys() == {"a", "b", ""}
    assert len(set().union(*seen[0].values())) == 3 * (len(PROMPT) // 16)


async def test_the_prefix_cache_is_shared_by_content_alone(folders: dict[str, Path]) -> None:
    async with serving(folders) as (_, client):
        cached = []
        for name in ("a", "b", "a", "f", None):
            (output,) = await client.generate([PROMPT], PARAMS, adapter=name)
            assert output.metrics is not None
            cached.append(output.metrics.num_cached_tokens)
    assert [each > 0 for each in cached] == [False, False, True, True, False]


async def test_adapters_come_and_go_while_serving(folders: dict[str, Path], tmp_path: Path) -> None:
    first = {"a": folders["a"]}
    async with serving(first, lora_root=[str(tmp_path)]) as (_, client):
        with pytest.raises(NotFoundError, match="adapter"):
            await client.generate([PROMPT], PARAMS, adapter="b")
        long = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
        running = asyncio.create_task(client.generate([PROMPT] * 3, long, adapter="a"))
        info = await client.load_adapter("b", str(folders["b"]))
        assert bytes.fromhex(info.content_hash) == content_hash(folders["b"])
        assert list(info.executors.values()) == ["loaded"]
        assert tokens(await client.generate([PROMPT], PARAMS, adapter="b")) == [
            greedy_tokens(PROMPT, NUM_TOKENS, folders["b"])
        ]
        await client.unload_adapter("a")
        # Another content under the same name shares nothing with the first.
        make_adapter(tmp_path / "other", b"other")
        await client.load_adapter("a", str(tmp_path / "other"))
        assert tokens(await client.generate([PROMPT], PARAMS, adapter="a")) == [
            greedy_tokens(PROMPT, NUM_TOKENS, tmp_path / "other")
        ]
        assert tokens(await running) == [greedy_tokens(PROMPT, 2000, folders["a"])] * 3
        assert [each.name for each in await client.adapters()] == ["b", "a"]


async def test_wrong_adapters_fail_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    broken = make_adapter(tmp_path / "broken", b"", rank=0)
    given = {"a": folders["a"], "broken": broken, "missing": tmp_path / "missing"}
    async with serving(given, lora_root=[str(tmp_path / "inside")]) as (running, client):
        for name in ("broken", "missing"):
            with pytest.raises(FailedPreconditionError, match=r"^adapter: .*adapter_config\.json"):
                await client.generate([PROMPT], PARAMS, adapter=name)
        assert tokens(await client.generate([PROMPT], PARAMS, adapter="a"))
        for path, code in (
            (str(folders["b"]), grpc.StatusCode.PERMISSION_DENIED),
            (str(tmp_path / "inside" / ".." / "b"), grpc.StatusCode.PERMISSION_DENIED),
            ("b", grpc.StatusCode.INVALID_ARGUMENT),
            (str(tmp_path / "inside" / "none"), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await running.admin.LoadAdapter(admin_pb2.LoadAdapterRequest(name="b", path=path))
            assert caught.value.code() is code, path
        with pytest.raises(CadenzaError, match="already"):
            await client.load_adapter("a", str(tmp_path / "inside"))
        with pytest.raises(NotFoundError):
            await client.unload_adapter("b")


async def test_an_executor_without_adapters_refuses_them_by_name(folders: dict[str, Path]) -> None:
    async with (
        cadenza_services("simulated", simulate="instant", max_loras=0, scheduler=options(folders)) as running,
        AsyncClient(running.target) as client,
    ):
        with pytest.raises(FailedPreconditionError, match=r"^adapter: the executor has no LoRA adapters"):
            await client.generate([PROMPT], PARAMS, adapter="a")
        assert tokens(await client.generate([PROMPT], PARAMS)) == [greedy_tokens(PROMPT, NUM_TOKENS, None)]


async def test_a_new_incarnation_loads_anew_and_no_token_changes(folders: dict[str, Path], tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"step_us": 2000, "adapter_load_us": 20000}')
    names = ["a", "b", None, "a"]
    long = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    async with executor_service("simulated", simulate=str(costs)) as address:
        scheduler = scheduler_service(address, one_session=False, **options(folders))
        running = await scheduler.__aenter__()
        client = await AsyncClient(running.target).__aenter__()
        generating = asyncio.create_task(client.generate([PROMPT] * 4, long, adapter=names))
        watch = running.admin.WatchSteps(admin_pb2.WatchStepsRequest())
        async with asyncio.timeout(10):
            async for response in watch:
                if any(record.step_id > 12 for record in response.records):
                    break
        watch.cancel()
    try:
        # Its successor at the same address has nothing.
        async with executor_service("simulated", simulate=str(costs), listen=address):
            found = tokens(await generating)
            assert found == [greedy_tokens(PROMPT, 150, folders[name] if name else None) for name in names]
    finally:
        await client.__aexit__(None, None, None)
        await scheduler.__aexit__(None, None, None)


async def test_changed_files_refuse_that_adapter_alone(folders: dict[str, Path]) -> None:
    async with executor_service("simulated", simulate="instant") as address:
        scheduler = scheduler_service(address, one_session=False, **options(folders))
        running = await scheduler.__aenter__()
        client = await AsyncClient(running.target).__aenter__()
        await client.generate([PROMPT] * 2, PARAMS, adapter=["a", "b"])
    try:
        make_adapter(folders["a"], b"changed")
        async with executor_service("simulated", simulate="instant", listen=address):
            with pytest.raises(FailedPreconditionError, match="its files have changed"):
                await client.generate([PROMPT], PARAMS, adapter="a")
            assert tokens(await client.generate([PROMPT], PARAMS, adapter="b")) == [
                greedy_tokens(PROMPT, NUM_TOKENS, folders["b"])
            ]
    finally:
        await client.__aexit__(None, None, None)
        await scheduler.__aexit__(None, None, None)


async def test_a_load_that_takes_too_long_ends_its_request_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"adapter_load_us": 1500000}')
    async with (
        cadenza_services(
            "simulated", simulate=str(costs), scheduler=options({"a": folders["a"]}, lora_load_timeout_s=0.2)
        ) as running,
        AsyncClient(running.target, reconnect_timeout_s=0) as client,
    ):
        waiting = asyncio.create_task(client.generate([PROMPT], PARAMS, adapter="a"))
        assert tokens(await client.generate([PROMPT], PARAMS)) == [greedy_tokens(PROMPT, NUM_TOKENS, None)]
        with pytest.raises(CadenzaError, match=r"'a' was not loaded within 0\.2 s"):
            await waiting


async def test_names_that_no_call_takes() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        for adapter in ("", "x" * 129, 5, ["a", "b"]):
            with pytest.raises((ValueError, InvalidRequestError), match="adapter"):
                await client.generate([PROMPT], PARAMS, adapter=adapter)  # type: ignore[arg-type]
