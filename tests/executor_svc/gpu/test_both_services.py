"""A real scheduler over the GPU's kernels: plans two in flight, swaps, samples, beams; the tokens of the CPU's path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cadenza import AsyncClient, RequestOutput, SamplingParams
from tests.checkpoints import make_checkpoint
from tests.helpers.models.mtp_heads import make_mimo
from tests.helpers.scheduler.gate import Gate
from tests.helpers.services import cadenza_services

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMITS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "max_model_len": 64,
    "block_size": 8,
    "num_gpu_blocks": 9,
    "num_cpu_blocks": 16,
    "num_threads": 1,
}
"""Fewer blocks than the requests want at once."""
REQUESTS = (
    (list(range(3, 40)), SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=9)),
    ([7] * 20, SamplingParams(temperature=0.9, seed=3, frequency_penalty=0.5, n=2, ignore_eos=True, max_tokens=9)),
    ([8, 1, 1], SamplingParams(temperature=0.0, beam_width=2, n=2, max_tokens=3)),
)


async def outputs(folder: Path, device: str, requests: Any = REQUESTS, **options: Any) -> list[RequestOutput]:
    """What the requests give, all there before the first step."""
    gate, options = Gate(), LIMITS | options
    async with (
        cadenza_services(folder, gate=gate, device=device, scheduler={"preemption": "swap"}, **options) as running,
        AsyncClient(running.target) as client,
    ):
        prompts, params = zip(*requests, strict=True)
        found = await gate.generate(client, prompts, params)
        await running.wait_until_free()
        if "speculative" in options:
            (executor,) = (await client.server_info()).executors
            assert executor.num_accepted_drafts > 0
            # Of the target's own weights.
            assert options["speculative"] != "draft" or executor.num_accepted_drafts > 0.9 * executor.num_drafts
    return found


async def test_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", vocab_size=131, num_hidden_layers=1, head_dim=64)
    expected, found = await outputs(folder, "cpu"), await outputs(folder, "cuda")
    for one, other in zip(found, expected, strict=True):
        assert [sample.token_ids for sample in one.outputs] == [sample.token_ids for sample in other.outputs]
    assert sum(output.metrics.num_preemptions for output in found) > 0


DRAFTED = (
    ([3, 9, 27, 81] * 5, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=30)),
    ([7] * 20, SamplingParams(temperature=0.4, seed=3, frequency_penalty=0.2, n=2, ignore_eos=True, max_tokens=14)),
    (
        [5, 6] * 4,
        SamplingParams(temperature=0.3, seed=4, logprobs=2, stop_token_ids=list(range(0, 131, 9)), min_tokens=7),
    ),
    ([8, 1, 1], SamplingParams(temperature=0.0, beam_width=2, n=2, max_tokens=3)),
)


@pytest.mark.long
@pytest.mark.parametrize("speculative", ["ngram", "suffix", "draft", "mtp", "auto"])
async def test_drafts_change_no_token(tmp_path: Path, speculative: str) -> None:
    """With few blocks: sequences with drafts are swapped out and come back, and some have no room for drafts."""
    if speculative in ("mtp", "auto"):
        folder = make_mimo(tmp_path, predicts=True, num_hidden_layers=1)
    else:
        folder = make_checkpoint(tmp_path, "llama", vocab_size=131, num_hidden_layers=1, head_dim=64)
    limits: dict[str, Any] = {"max_num_seqs": 16, "num_gpu_blocks": 16}
    expected = await outputs(folder, "cpu", DRAFTED, **limits)
    if speculative == "draft":
        limits["speculative_model"] = str(folder)
    found = await outputs(folder, "cuda", DRAFTED, speculative=speculative, num_speculative_tokens=3, **limits)
    for one, other in zip(found, expected, strict=True):
        assert [sample.token_ids for sample in one.outputs] == [sample.token_ids for sample in other.outputs]
        assert [sample.finish_detail for sample in one.outputs] == [sample.finish_detail for sample in other.outputs]
