"""Both services and a simulated model with recurrent states: the right tokens under pressure, hits, and a refusal."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cadenza import AsyncClient, FailedPreconditionError, SamplingParams
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.simulated.expected_tokens import expected_tokens
from tests.helpers.services import cadenza_services

pytestmark = pytest.mark.slow

VOCAB_SIZE = 500
OPTIONS: dict[str, Any] = {
    "simulate": "instant", "simulate_vocab_size": VOCAB_SIZE, "max_model_len": 512, "block_size": 8,
    "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks": 150, "num_cpu_blocks": 100,
}  # fmt: skip


@pytest.mark.parametrize("groups", [None, "full:1,24:2"])
async def test_tokens_do_not_depend_on_who_has_a_state_and_where(groups: str | None) -> None:
    rng = random.Random(3)
    text = [rng.randrange(VOCAB_SIZE) for _ in range(120)]
    prompts = [[*text[: rng.choice([40, 90, 120])], *(rng.randrange(VOCAB_SIZE) for _ in range(9))] for _ in range(16)]
    greedy = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    several = SamplingParams(temperature=0.8, n=3, seed=5, max_tokens=50, ignore_eos=True)
    options = OPTIONS | {"simulate_state_pages": 5, "simulate_kv_groups": groups}
    async with (
        cadenza_services("simulated", **options) as running,
        AsyncClient(running.target) as client,
    ):
        outputs = await client.generate([*prompts, prompts[0]], [*([greedy] * len(prompts)), several])
        again = await client.generate([prompts[5]], [greedy])
        with pytest.raises(FailedPreconditionError, match="beam search with recurrent states"):
            await client.generate([prompts[0]], [SamplingParams(beam_width=2, max_tokens=5)])
        await running.wait_until_free()
    for prompt, output in zip([*prompts, prompts[5]], [*outputs[:-1], *again], strict=True):
        wanted = expected_tokens(prompt, SequenceSampling(temperature=0.0), 50, VOCAB_SIZE)
        assert list(output.outputs[0].token_ids) == wanted
    drawn = SequenceSampling(temperature=0.8, seed=5)
    for index, sample in enumerate(outputs[-1].outputs):
        assert list(sample.token_ids) == expected_tokens(prompts[0], drawn, 50, VOCAB_SIZE, sample_index=index)
