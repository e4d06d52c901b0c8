"""Adapters that operators load survive a restart of a scheduler with a journal, and so do requests of theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cadenza import AsyncClient, SamplingParams
from cadenza.errors import CadenzaError
from cadenza.v1 import generation_pb2
from tests.helpers.executor.simulated_adapters import greedy_tokens, make_adapter
from tests.helpers.scheduler.scheduler_world import collect, request
from tests.helpers.services import executor_service, scheduler_service

PROMPT = [5, 6, 7, 8]
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
NUM_TOKENS = 400


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Three adapters, and costs of steps beside them."""
    (tmp_path / "costs.json").write_text(json.dumps({"step_us": 1000}))
    return {name: make_adapter(tmp_path / "root" / name, name.encode()) for name in ("a", "b", "c")}


def long_request(adapter: str) -> generation_pb2.GenerateRequest:
    params: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    return request(ids=PROMPT, adapter=adapter, request_id=adapter, resume_grace_s=60, **params)


async def test_adapters_and_their_requests_go_on(folders: dict[str, Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"journal": str(tmp_path / "journal"), "lora_root": [str(tmp_path / "root")]}
    async with executor_service("simulated", simulate=str(tmp_path / "costs.json")) as address:
        async with (
            scheduler_service(address, one_session=False, **options) as first,
            AsyncClient(first.target, reconnect_timeout_s=0) as client,
        ):
            for name, folder in folders.items():
                await client.load_adapter(name, str(folder))
            with pytest.raises(CadenzaError, match="adapter_config"):
                await client.load_adapter("broken", str(tmp_path / "root" / "none"))
            await client.unload_adapter("c")
            call = first.generation.Generate(long_request("a"))
            await call.read()
        async with (
            scheduler_service(address, one_session=False, **options) as second,
            AsyncClient(second.target, reconnect_timeout_s=0) as client,
        ):
            assert [(each.name, each.path) for each in await client.adapters()] == [
                (name, str(folders[name])) for name in ("a", "b")
            ]
            out = await collect(second.generation.Generate(long_request("a")))
            assert out.ids == greedy_tokens(PROMPT, NUM_TOKENS, folders["a"])
            (output,) = await client.generate([PROMPT], PARAMS, adapter="b")
            assert output.outputs[0].token_ids == greedy_tokens(PROMPT, 5, folders["b"])
            await client.unload_adapter("a")
        # A name of the options goes before that of the journal, and a path that is not allowed any more is left out.
        options |= {"lora": [f"b={folders['c']}"], "lora_root": []}
        async with (
            scheduler_service(address, one_session=False, **options) as third,
            AsyncClient(third.target, reconnect_timeout_s=0) as client,
        ):
            assert [(each.name, each.path) for each in await client.adapters()] == [("b", str(folders["c"]))]
