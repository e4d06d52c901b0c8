"""Adapters that a scheduler with --lora-dir learns of from the first request that names them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cadenza import AsyncClient, SamplingParams
from cadenza.errors import CadenzaError, FailedPreconditionError, NotFoundError
from scheduler_svc.engine.adapters import names as adapter_names
from tests.helpers.executor.simulated_adapters import greedy_tokens, make_adapter
from tests.helpers.services import Running, cadenza_services

NUM_TOKENS = 8
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPT = [5, 6, 7, 8]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the adapters a and b, and one beside it."""
    for name in ("folder/a", "folder/b", "beside"):
        make_adapter(tmp_path / name, name.encode())
    return tmp_path / "folder"


@asynccontextmanager
async def serving(folder: Path, **executor: Any) -> AsyncIterator[tuple[Running, AsyncClient]]:
    scheduler = {"lora_dir": str(folder), **executor.pop("scheduler", {})}
    async with (
        cadenza_services("simulated", simulate="instant", scheduler=scheduler, **executor) as running,
        AsyncClient(running.target) as client,
    ):
        yield running, client


async def tokens(client: AsyncClient, name: str | None) -> list[int]:
    (output,) = await client.generate([PROMPT], PARAMS, adapter=name)
    return output.outputs[0].token_ids


async def names(client: AsyncClient) -> list[str]:
    return [each.name for each in await client.adapters()]


async def test_the_first_request_loads_an_adapter(folder: Path) -> None:
    async with serving(folder) as (_, client):
        assert await names(client) == []
        used = ["a", "b", None] * 4
        outputs = await client.generate([PROMPT] * len(used), PARAMS, adapter=used)
        assert [each.outputs[0].token_ids for each in outputs] == [
            greedy_tokens(PROMPT, NUM_TOKENS, folder / name if name else None) for name in used
        ]
        assert await names(client) == ["a", "b"]


@pytest.mark.parametrize("with_root", [False, True])
async def test_a_name_without_a_folder_is_unknown_and_leaves_nothing(folder: Path, with_root: bool) -> None:
    root = {"lora_root": [str(folder)]} if with_root else {}
    async with serving(folder, **root) as (_, client):
        calls = [tokens(client, name) for name in ("none", "none", "c", "a")]
        *missing, found = await asyncio.gather(*calls, return_exceptions=True)
        for each in missing:
            assert isinstance(each, NotFoundError)
            assert "there is no adapter" in str(each)
        assert found == greedy_tokens(PROMPT, NUM_TOKENS, folder / "a")
        assert await names(client) == ["a"]
        make_adapter(folder / "none", b"there now")
        assert await tokens(client, "none") == greedy_tokens(PROMPT, NUM_TOKENS, folder / "none")


@pytest.mark.parametrize("name", ["../beside", ".", "..", ".hidden", "a/b", "/etc", "a\\b", "a,b", "a=b"])
async def test_names_that_are_no_folder_of_it_are_unknown(folder: Path, name: str) -> None:
    make_adapter(folder / ".hidden", b"")
    async with serving(folder) as (_, client):
        with pytest.raises(NotFoundError, match="adapter"):
            await tokens(client, name)
        assert await names(client) == []


async def test_a_broken_folder_fails_its_requests_with_the_reason(folder: Path, tmp_path: Path) -> None:
    make_adapter(folder / "broken", b"", rank=0)
    (folder / "outside").symlink_to(tmp_path / "beside")
    async with serving(folder, lora_root=[str(folder)]) as (_, client):
        with pytest.raises(FailedPreconditionError, match=r"^adapter: .*adapter_config\.json"):
            await tokens(client, "broken")
        with pytest.raises(FailedPreconditionError, match=r"^adapter: .*not a folder below"):
            await tokens(client, "outside")
        assert await names(client) == []
        make_adapter(folder / "broken", b"mended")
        assert await tokens(client, "broken") == greedy_tokens(PROMPT, NUM_TOKENS, folder / "broken")


async def test_a_replaced_folder_is_another_adapter_once_it_was_unloaded(folder: Path) -> None:
    async with serving(folder, max_loras=1, max_cpu_loras=1) as (_, client):
        old = await tokens(client, "a")
        make_adapter(folder / "a", b"trained again")
        assert await tokens(client, "a") == old, "it is loaded"
        await client.unload_adapter("a")
        assert await tokens(client, "a") == greedy_tokens(PROMPT, NUM_TOKENS, folder / "a") != old
        # Where it was evicted, the other content is found when it is loaded again: that request alone fails.
        await tokens(client, "b")
        make_adapter(folder / "a", b"and again")
        with pytest.raises(FailedPreconditionError, match="its files have changed"):
            await tokens(client, "a")
        assert await tokens(client, "a") == greedy_tokens(PROMPT, NUM_TOKENS, folder / "a")


async def test_unused_names_are_forgotten_beyond_the_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_names, "MAX_FIRST_USES", 3)
    for index in range(6):
        shutil.copytree(folder / "a", folder / f"copy{index}")
    async with serving(folder, max_loras=2, max_cpu_loras=2, scheduler={"lora": [f"kept={folder}/b"]}) as (_, client):
        for name in ("kept", "copy0", "copy1", "copy2", "copy0", "copy3"):
            await tokens(client, name)
        assert await names(client) == ["kept", "copy0", "copy2", "copy3"]
        used = [f"copy{index}" for index in range(6)]
        await client.generate([PROMPT] * 6, PARAMS, adapter=used)
        await tokens(client, "copy5")
        assert await names(client) == ["kept", "copy3", "copy4", "copy5"]


async def test_a_name_that_was_given_is_not_looked_up(folder: Path, tmp_path: Path) -> None:
    given = {"lora": [f"a={tmp_path / 'beside'}", f"gone={tmp_path / 'gone'}"]}
    async with serving(folder, scheduler=given) as (_, client):
        assert await tokens(client, "a") == greedy_tokens(PROMPT, NUM_TOKENS, tmp_path / "beside")
        with pytest.raises(FailedPreconditionError, match="adapter_config"):
            await tokens(client, "gone")
        assert await names(client) == ["a", "gone"]


async def test_a_request_that_is_refused_for_another_reason_leaves_no_name(folder: Path) -> None:
    async with serving(folder, num_gpu_blocks=4, block_size=16) as (_, client):
        with pytest.raises(CadenzaError, match="blocks"):
            await client.generate([[5] * 200], PARAMS, adapter="a")
        assert await names(client) == []
