"""Which tenants may use LoRA adapters, and which may load them, on a whole service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cadenza import AsyncClient, PermissionDeniedError, SamplingParams
from cadenza.errors import NotFoundError
from cadenza.v1 import admin_pb2
from cadenza.v1.admin_pb2_grpc import AdminServiceStub
from scheduler_svc.app import Service
from scheduler_svc.config import SchedulerConfig
from tests.helpers.executor.simulated_adapters import greedy_tokens, make_adapter
from tests.helpers.services import executor_service
from tests.helpers.tenants import token, write_tenants

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [5, 6, 7, 8]
TENANTS: dict[str, dict[str, Any]] = {
    "gold": {"adapters": ["sql", "gold-*"], "may_load_adapters": True},
    "free": {"adapters": []},
    "any": {},
    "ops": {"admin": True, "adapters": ["none"]},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three adapters."""
    for name in ("sql", "gold-1", "chat"):
        make_adapter(tmp_path / "folder" / name, name.encode())
    return tmp_path / "folder"


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[tuple[Service, dict[str, AsyncClient]]]:
    """A service with the tenants above; yields it, and a client of each tenant."""
    tenants = write_tenants(folder.parent / "tenants.toml", TENANTS)
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(executor_service("simulated", simulate="instant"))
        config = SchedulerConfig(executor=[address], listen="127.0.0.1:0", tenants=tenants, **options)
        service = Service(config)
        stack.push_async_callback(service.stop)
        target = await service.start()
        await service.open()
        clients = {name: AsyncClient(target, token=token(name), reconnect_timeout_s=0) for name in TENANTS}
        for client in clients.values():
            await stack.enter_async_context(client)
        yield service, clients


async def tokens(client: AsyncClient, name: str) -> list[int]:
    (output,) = await client.generate([PROMPT], PARAMS, adapter=name)
    return output.outputs[0].token_ids


async def refusal(client: AsyncClient, name: str) -> str:
    """Why a request with this adapter is refused, with the name left out."""
    with pytest.raises(PermissionDeniedError) as caught:
        await tokens(client, name)
    return str(caught.value).replace(repr(name), "NAME")


@pytest.mark.parametrize("by_first_use", [False, True])
async def test_tenants_use_the_adapters_of_their_list_alone(folder: Path, by_first_use: bool) -> None:
    names = ("sql", "gold-1", "chat")
    given = {"lora_dir": str(folder)} if by_first_use else {"lora": [f"{name}={folder / name}" for name in names]}
    async with serving(folder, **given) as (_, clients):
        # Before anybody may have used them, and after.
        first = {await refusal(clients["free"], name) for name in (*names, "unknown")}
        for name in ("sql", "gold-1"):
            assert await tokens(clients["gold"], name) == greedy_tokens(PROMPT, 6, folder / name)
        assert await tokens(clients["any"], "chat") == greedy_tokens(PROMPT, 6, folder / "chat")
        refusals = {await refusal(clients["gold"], name) for name in ("chat", "unknown", "Sql")}
        assert first | refusals == {"adapter: this tenant may not use the adapter NAME"}
        with pytest.raises(NotFoundError, match="there is no adapter 'gold-2'"):
            await tokens(clients["gold"], "gold-2")
        assert len(await clients["free"].generate([PROMPT], PARAMS)) == 1


async def test_an_admin_sees_all_adapters_and_a_loader_those_that_it_may_use(folder: Path) -> None:
    async with serving(folder, lora_root=[str(folder)], lora=[f"chat={folder / 'chat'}"]) as (_, clients):
        gold, ops = clients["gold"], clients["ops"]
        assert (await gold.load_adapter("sql", str(folder / "sql"))).name == "sql"
        await ops.load_adapter("gold-1", str(folder / "gold-1"))
        assert [each.name for each in await gold.adapters()] == ["sql", "gold-1"]
        assert [each.name for each in await ops.adapters()] == ["chat", "sql", "gold-1"]
        messages = set()
        for name in ("chat", "unknown"):
            for call in (gold.unload_adapter(name), gold.load_adapter(name, str(folder / "sql"))):
                with pytest.raises(PermissionDeniedError) as caught:
                    await call
                messages.add(str(caught.value).replace(repr(name), "NAME"))
        assert messages == {"name: this tenant may not use the adapter NAME"}
        await gold.unload_adapter("gold-1")
        await ops.unload_adapter("sql")
        for client in (clients["free"], clients["any"]):
            for call in (client.load_adapter("sql", str(folder / "sql")), client.unload_adapter("chat")):
                with pytest.raises(PermissionDeniedError, match="admin or may_load_adapters"):
                    await call
            with pytest.raises(PermissionDeniedError, match="admin or may_load_adapters"):
                await client.adapters()
        # What else an admin may do, a loader may not.
        with pytest.raises(grpc.aio.AioRpcError, match="admin = true"):
            await gold.stub_of(AdminServiceStub).Drain(admin_pb2.DrainRequest())


async def test_a_changed_list_holds_for_new_requests(folder: Path) -> None:
    async with serving(folder, lora_dir=str(folder)) as (service, clients):
        long = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
        running = asyncio.create_task(clients["any"].generate([PROMPT], long, adapter="chat"))
        await tokens(clients["any"], "chat")
        write_tenants(folder.parent / "tenants.toml", TENANTS | {"any": {"adapters": ["sql"]}})
        service.reload_tenants()
        await refusal(clients["any"], "chat")
        assert await tokens(clients["any"], "sql") == greedy_tokens(PROMPT, 6, folder / "sql")
        (output,) = await running
        assert output.outputs[0].token_ids == greedy_tokens(PROMPT, 1000, folder / "chat")
