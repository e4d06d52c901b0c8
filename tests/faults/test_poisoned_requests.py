"""A request that kills the executor's process in every attempt: `cadenza up` finds it and ends it alone."""

from __future__ import annotations

import asyncio
import json
import math
import signal
from pathlib import Path

import pytest

from cadenza import AsyncClient, RequestOutput, SamplingParams
from tests.faults.test_killed_processes import Up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

POISON = 31_337
POSITION = 20
NUM_REQUESTS = 64
RESTARTED = "starting it again"


def params(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=60, temperature=0.8, seed=seed, ignore_eos=True)


def prompt(number: int) -> list[int]:
    """A prompt of 5 to 14 tokens, so the fatal position is in the output."""
    return [number, *range(100, 104 + number % 10)]


DRAFTS = ("--max-num-seqs", "256", "--speculative", "suffix", "--num-speculative-tokens", "2")


PLAIN_AND_DRAFTS = [pytest.param(("--max-num-seqs", str(NUM_REQUESTS)), marks=pytest.mark.long), DRAFTS]


@pytest.mark.parametrize("options", PLAIN_AND_DRAFTS, ids=["no drafts", "drafts"])
async def test_one_of_64_fails_and_all_others_get_their_tokens(tmp_path: Path, options: tuple[str, ...]) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"step_us": 3000}))
    up = Up(
        Path("simulated"), tmp_path / "log", "--simulate", str(costs), *options,
        "--inject", f"die@{POISON}:{POSITION}",
    )  # fmt: skip

    async def generate(client: AsyncClient, number: int) -> RequestOutput:
        (output,) = await client.generate([prompt(number)], params(number))
        return output

    async with AsyncClient(up.target) as client:
        expected = await asyncio.gather(*(generate(client, number) for number in range(1, NUM_REQUESTS)))
        assert RESTARTED not in up.log
        poisoned = client.generate([[POISON, *range(5)]], params(0))
        *outputs, (failed,) = await asyncio.gather(
            *(generate(client, number) for number in range(1, NUM_REQUESTS)), poisoned
        )
    assert failed.outputs[0].finish_detail == "executor_error"
    assert len(failed.outputs[0].token_ids) <= POSITION
    for output, undisturbed in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == undisturbed.outputs[0].token_ids
        assert output.outputs[0].finish_reason == "length"
    num_deaths = up.log.count(RESTARTED)
    assert 4 <= num_deaths <= math.log2(NUM_REQUESTS) + 3, up.log
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(60) == 0, up.log
    assert up.process.stdout is not None
    up.process.stdout.close()
