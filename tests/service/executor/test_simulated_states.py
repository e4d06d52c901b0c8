"""Both services and a simulated model with recurrent states: the right tokens and beams under pressure, and hits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cadenza import AsyncClient, SamplingParams
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.simulated.expected_tokens import expected_tokens
from scheduler_svc.core.types import BeamSpec, RequestSpec
from tests.helpers.core.known import VOCAB_SIZE, known_beams
from tests.helpers.services import cadenza_services

pytestmark = pytest.mark.slow

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
    search = SamplingParams(beam_width=3, n=3, max_tokens=50, ignore_eos=True)
    searched = [prompts[1], prompts[2]]
    options = OPTIONS | {"simulate_state_pages": 5, "simulate_kv_groups": groups}
    async with (
        cadenza_services("simulated", **options) as running,
        AsyncClient(running.target) as client,
    ):
        outputs = await client.generate(
            [*prompts, prompts[0], *searched], [*([greedy] * len(prompts)), several, search, search]
        )
        again = await client.generate([prompts[5]], [greedy])
        await running.wait_until_free()
    for prompt, output in zip([*prompts, prompts[5]], [*outputs[: len(prompts)], *again], strict=True):
        wanted = expected_tokens(prompt, SequenceSampling(temperature=0.0), 50, VOCAB_SIZE)
        assert list(output.outputs[0].token_ids) == wanted
    drawn = SequenceSampling(temperature=0.8, seed=5)
    for index, sample in enumerate(outputs[len(prompts)].outputs):
        assert list(sample.token_ids) == expected_tokens(prompts[0], drawn, 50, VOCAB_SIZE, sample_index=index)
    for prompt, output in zip(searched, outputs[-2:], strict=True):
        spec = RequestSpec("", tuple(prompt), SequenceSampling(), 50, num_samples=3, beams=BeamSpec(3))
        wanted = [(found.token_ids, found.cumulative_logprob) for found in known_beams(spec, 512)]
        assert [(tuple(sample.token_ids), sample.cumulative_logprob) for sample in output.outputs] == wanted
