"""The door for constraints, in whole services: time that runs out there, and a model folder that is replaced."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cadenza import AsyncClient, SamplingParams
from cadenza.errors import FailedPreconditionError
from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from scheduler_svc.requests.compiling_child import CompilingChild
from tests.checkpoints import make_llama
from tests.helpers.services import cadenza_services, executor_service, scheduler_service

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"max_num_seqs": 8, "num_gpu_blocks": 100, "num_threads": 1}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_llama(tmp_path / "model", tokenizer=True, vocab_size=300)


def message(grammar: str, timeout_s: float, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt=[types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=[9]))],
        sampling_params=types_pb2.SamplingParams(max_tokens=20, grammar=types_pb2.GrammarSpec(grammar=grammar)),
        timeout_s=timeout_s,
        **fields,
    )


async def test_time_that_runs_out_at_the_door_ends_a_request(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As anywhere else: with its reason, and no token."""
    async with cadenza_services(model, **OPTIONS) as running:
        with monkeypatch.context() as patch:
            patch.setattr(CompilingChild, "compile", lambda *_: None)
            calls = [running.generation.Generate(message('start: "a"', 0.2)) for _ in range(2)]
            ends = [[each async for each in call] for call in calls]
        for responses in ends:
            (output,) = [output for each in responses for output in each.outputs]
            assert output.finish.detail == types_pb2.FINISH_DETAIL_DEADLINE
            assert not output.token_ids
        fine = [each async for each in running.generation.Generate(message('start: "ab"', 30.0))]
        assert "".join(output.text for each in fine for output in each.outputs) == "ab"
        await running.wait_until_free()


def swap_letters(path: Path) -> None:
    """Let the ids of letters and of digits mean each other."""
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    for one, other in zip("abcdefghij", "0123456789", strict=True):
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(content), encoding="utf-8")


async def test_a_tokenizer_that_is_replaced_in_its_folder(model: Path) -> None:
    """The scheduler checks constraints by the file that the executor has read, once that has come back."""
    constraint = SamplingParams(max_tokens=20, structured_outputs={"regex": "[a-j]{3}[0-9]{3}"})

    async def text(client: AsyncClient) -> str:
        (result,) = await client.generate([[9]], constraint)
        assert result.outputs[0].finish_detail == "eos"
        return result.outputs[0].text

    async with executor_service(model, **OPTIONS) as address:
        scheduler = scheduler_service(address, one_session=False)
        running = await scheduler.__aenter__()
        client = await AsyncClient(running.target).__aenter__()
        assert re.fullmatch("[a-j]{3}[0-9]{3}", await text(client))
        epoch = await running.epoch()
    swap_letters(model / "tokenizer.json")
    async with executor_service(model, listen=address, **OPTIONS), asyncio.timeout(30):
        while await running.epoch() == epoch:
            pass  # each look is a call
        with suppress(FailedPreconditionError):  # if it came before the news
            await text(client)
        assert re.fullmatch("[a-j]{3}[0-9]{3}", await text(client))
        await client.__aexit__(None, None, None)
        await scheduler.__aexit__(None, None, None)
