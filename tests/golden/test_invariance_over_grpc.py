"""The load of test_invariance.py through both services over gRPC: requests get the bits that they have alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cadenza import AsyncClient, RequestOutput, SamplingParams
from scheduler_svc.core.types import RequestSpec
from tests.executor_svc.driver import NUM_THREADS
from tests.golden.invariance import (
    DTYPES,
    Golden,
    golden_in,
    load,
)
from tests.helpers.marks import short_and_long
from tests.helpers.services import cadenza_services

SERVED: dict[str, dict[str, Any]] = {
    "roomy": {"num_gpu_blocks": 600, "max_num_batched_tokens": 64},
    "few blocks, swap": {
        "num_gpu_blocks": 34, "block_size": 8, "num_cpu_blocks": 200,
        "scheduler": {"preemption": "swap", "max_inflight_plans": 4},
    },
    # What is reserved is never fought over, but for the copies that a fork makes of its prompt's last block, which are
    # reserved until another request joins: 34 blocks are two too few.
    "dynamic": {
        "num_gpu_blocks": 40, "block_size": 8,
        "scheduler": {"batching": "dynamic", "batch_size": 6, "batch_window_ms": 20, "order": "sjf"},
    },
    "n-gram drafts": {"num_gpu_blocks": 600, "max_num_seqs": 100, "speculative": "ngram", "num_speculative_tokens": 3},
    "few blocks, suffix drafts": {
        "num_gpu_blocks": 34, "block_size": 8, "num_cpu_blocks": 200, "max_num_seqs": 60, "speculative": "suffix",
        "scheduler": {"preemption": "swap"},
    },
    "drafts as they pay": {"num_gpu_blocks": 600, "max_num_seqs": 100, "speculative": "auto"},
}  # fmt: skip


@pytest.fixture(scope="module", params=DTYPES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    yield from golden_in(request.param, tmp_path_factory.mktemp("model"))


_ALIKE = (
    "top_p", "top_k", "min_p", "top_n_sigma", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "allowed_token_ids", "bad_words",
)  # fmt: skip


def to_params(spec: RequestSpec) -> SamplingParams:
    """The request as a client sends it; every stop token by its id."""
    sampling, beams = spec.sampling, spec.beams
    never = {True: True, False: False, None: "never"}
    search: dict[str, Any] = (
        {"beam_width": beams.width, "length_penalty": beams.length_penalty}
        | {"early_stopping": never[beams.early_stopping]}
        if beams
        else {}
    )
    values = {name: getattr(sampling, name) for name in _ALIKE if getattr(sampling, name)}
    biases = dict(zip(sampling.bias_token_ids, sampling.biases, strict=True))
    return SamplingParams(
        n=spec.num_samples, seed=sampling.seed, max_tokens=spec.max_tokens, min_tokens=sampling.min_tokens,
        ignore_eos=True, stop_token_ids=list(sampling.stop_token_ids), logprobs=sampling.num_logprobs,
        prompt_logprobs=sampling.num_prompt_logprobs, priority=spec.priority, logit_bias=biases or None,
        **values, temperature=sampling.temperature, **search,
    )  # fmt: skip


def check_output(golden: Golden, request_id: str, output: RequestOutput) -> None:
    for sample in output.outputs:
        alone = golden.expected[request_id, sample.index]
        assert sample.token_ids == alone.token_ids, request_id
        rows = zip(sample.logprobs or (), sample.token_ids, strict=sample.logprobs is not None)
        assert [row[token_id].logprob for row, token_id in rows] == alone.chosen_logprobs, request_id
        if alone.cumulative_logprob is not None:
            assert sample.cumulative_logprob == alone.cumulative_logprob, request_id


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("golden", "name"),
    short_and_long(
        [(dtype, name) for dtype in DTYPES for name in SERVED],
        [
            *(("float32", name) for name in SERVED if name not in ("roomy", "few blocks, swap")),
            ("bfloat16", "few blocks, swap"),
        ],
    ),
    indirect=["golden"],
    scope="module",
)
async def test_the_same_through_both_services(golden: Golden, name: str) -> None:
    """What the core and the executor say of it in one process; words to ban need a tokenizer, and are left out."""
    chats = [chat for chat in load() if not chat.spec.sampling.bad_words]
    options = {"max_num_seqs": 24, "num_threads": NUM_THREADS, **SERVED[name]}
    async with cadenza_services(golden.folder, dtype=golden.dtype, **options) as running:
        async with AsyncClient(running.target) as client:
            while chats:
                prompts = [
                    {"prompt_token_ids": list(chat.spec.prompt_token_ids), "cache_salt": chat.spec.cache_salt.hex()}
                    for chat in chats
                ]
                outputs = await client.generate(prompts, [to_params(chat.spec) for chat in chats])
                for chat, output in zip(chats, outputs, strict=True):
                    check_output(golden, chat.spec.request_id, output)
                answers = [output.outputs[0].token_ids for output in outputs]
                chats = [chat.turn(answer) for chat, answer in zip(chats, answers, strict=True) if chat.says]
        load_now = await running.load()
        assert (load_now.num_preemptions > 0) is name.startswith("few")
        assert load_now.num_prefix_hits > 0
        await running.wait_until_free()
