"""What the metrics, GetServerInfo and `cadenza top` say of LoRA adapters, on a whole service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from cadenza import AsyncClient, SamplingParams
from cadenza.errors import CadenzaError
from cadenza.info import AdapterUse, ServerInfo
from scheduler_svc.app import Service
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.metrics.export import scrape
from tests.helpers.executor.simulated_adapters import make_adapter
from tests.helpers.services import executor_service

PROMPT = [5, 6, 7, 8]
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Service, AsyncClient]]:
    """A service with one adapter in a batch and two loaded, and a folder with three of them."""
    for name in ("a", "b", "c"):
        make_adapter(tmp_path / "folder" / name, name.encode())
    costs = tmp_path / "costs.json"
    costs.write_text('{"step_us": 1000, "adapter_load_us": 3000}')
    async with AsyncExitStack() as stack:
        executor = executor_service("simulated", simulate=str(costs), max_loras=1, max_cpu_loras=2)
        address = await stack.enter_async_context(executor)
        config = SchedulerConfig(executor=[address], listen="127.0.0.1:0", lora_dir=str(tmp_path / "folder"))
        service = Service(config)
        stack.push_async_callback(service.stop)
        target = await service.start()
        await service.open()
        yield service, await stack.enter_async_context(AsyncClient(target, reconnect_timeout_s=0))


def figures(service: Service, name: str) -> dict[tuple[str, ...], float]:
    """The samples of a family by label values, without the executor's address."""
    (family,) = [each for each in scrape(service._metrics.snapshot()).families() if name.startswith(each.name)]
    return {
        tuple(value for label, value in sample.labels.items() if label not in ("executor", "le")): sample.value
        for sample in family.samples
        if sample.name == name
    }


async def until(client: AsyncClient, uses: list[AdapterUse]) -> ServerInfo:
    """The server's description once these adapters are in use; each look costs a call, so this does not spin."""
    async with asyncio.timeout(10):
        while True:
            info = await client.server_info()
            if info.adapters == uses:
                return info


async def test_running_and_waiting_adapters_are_named(served: tuple[Service, AsyncClient]) -> None:
    service, client = served
    running = [asyncio.create_task(client.generate([PROMPT], LONG, adapter="a")) for _ in range(2)]
    await until(client, [AdapterUse("a", 2, 0)])
    waiting = asyncio.create_task(client.generate([PROMPT], SHORT, adapter="b"))
    plain = asyncio.create_task(client.generate([PROMPT], SHORT))
    info = await until(client, [AdapterUse("a", 2, 0), AdapterUse("b", 0, 1)])
    assert (info.executors[0].num_loaded_adapters, info.executors[0].max_loaded_adapters) in ((1, 2), (2, 2))
    before = service._engine.clock.wall_time_ns() / 1e9
    ((labels, time_s),) = figures(service, "vllm:lora_requests_info").items()
    assert labels == ("1", "a", "b")
    assert before <= time_s < before + 10
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await waiting
    await plain
    await until(client, [])
    assert list(figures(service, "vllm:lora_requests_info")) == [("1", "", "")]


async def test_loads_unloads_and_refusals_are_counted(served: tuple[Service, AsyncClient], tmp_path: Path) -> None:
    service, client = served
    lane = "cadenza_lane_"
    await client.generate([PROMPT], SHORT, adapter="a")
    for name in ("unknown", "../a", "unknown"):
        with pytest.raises(CadenzaError):
            await client.generate([PROMPT], SHORT, adapter=name)
    await client.generate([PROMPT], SHORT, adapter="b")
    await client.generate([PROMPT], SHORT, adapter="c")
    assert figures(service, lane + "adapter_loads_total") == {("loaded",): 3, ("failed",): 2, ("changed",): 0}
    assert figures(service, lane + "adapter_unloads_total") == {("evicted",): 1, ("removed",): 0, ("refused",): 0}
    assert figures(service, lane + "adapters") == {("loaded",): 2, ("loading",): 0}
    assert figures(service, lane + "max_adapters") == {(): 2}
    assert figures(service, lane + "adapter_load_seconds_count") == {(): 3}
    assert 3 * 0.003 <= figures(service, lane + "adapter_load_seconds_sum")[()] < 60
    assert figures(service, "cadenza_adapters") == {(): 3}
    assert figures(service, "cadenza_adapter_requests_refused_total") == {("unknown",): 3}
    make_adapter(tmp_path / "folder" / "a", b"broken", rank=0)
    with pytest.raises(CadenzaError):
        await client.generate([PROMPT], SHORT, adapter="a")
    await client.unload_adapter("c")
    async with asyncio.timeout(10):
        while figures(service, lane + "adapter_unloads_total")[("removed",)] < 1:
            await client.server_info()
    assert figures(service, "cadenza_adapter_requests_refused_total") == {("unknown",): 3, ("failed",): 1}
