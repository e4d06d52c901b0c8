"""A request's tokens and logprobs, to the bit, whatever it is batched with.

Over batch composition, chunk size, block size, pool size (small enough to force preemption), plans in flight, order of
arrival, batching policies and orders of service; greedy and seeded sampling; fp32 and bf16; through both services over
gRPC.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import AsyncClient, RequestOutput, SamplingParams
from tests.checkpoints import make_llama
from tests.helpers.services import cadenza_services

Outcome = tuple[list[int], list[list[tuple[int, float]]], str | None]


@dataclass(frozen=True)
class Setting:
    """One way to run the same requests."""

    name: str
    block_size: int = 16
    num_gpu_blocks: int = 400
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    max_inflight_plans: int = 2
    one_by_one: bool = False
    shuffle: bool = False
    preempts: bool = False
    scheduler: dict[str, Any] = field(default_factory=dict)


SETTINGS = [
    Setting("small chunks", max_num_batched_tokens=16),
    Setting("odd chunks", max_num_batched_tokens=37),
    Setting("blocks of 8", block_size=8),
    Setting("blocks of 32", block_size=32),
    Setting("one plan in flight", max_inflight_plans=1),
    Setting("four plans in flight", max_inflight_plans=4),
    Setting("alone", one_by_one=True),
    Setting("other order", shuffle=True),
    Setting("small pool", block_size=8, num_gpu_blocks=30, preempts=True),
    Setting("small pool, small chunks", block_size=16, num_gpu_blocks=16, max_num_batched_tokens=24, preempts=True),
    Setting("static batches", scheduler={"batching": "static", "batch_size": 4}),
    Setting("dynamic batches", scheduler={"batching": "dynamic", "batch_size": 5, "batch_window_ms": 20}),
    Setting("newcomers held back", scheduler={"waiting_served_ratio": 2.0, "max_waiting_steps": 7}, max_num_seqs=5),
    Setting("long prompts in pieces", scheduler={"long_prefill_token_threshold": 11}),
    Setting("shortest first", block_size=8, num_gpu_blocks=30, preempts=True, scheduler={"order": "sjf"}),
    Setting("fair, old ones first", max_num_seqs=3, scheduler={"order": "fair", "max_wait_s": 0.2}),
]


def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(7)
    made = []
    for index, length in enumerate([1, 2, 7, 15, 16, 17, 31, 40, 63, 64, 65, 90]):
        prompt = [rng.randrange(2, 131) for _ in range(length)]
        greedy = index % 2 == 0
        made.append(
            (
                prompt,
                SamplingParams(
                    temperature=0.0 if greedy else 0.9,
                    top_p=1.0 if index % 3 else 0.9,
                    top_k=0 if index % 4 else 40,
                    min_p=0.02 if index % 5 == 0 else 0.0,
                    seed=index * 1_000_003,
                    max_tokens=40,
                    ignore_eos=index % 3 == 0,
                    logprobs=3,
                ),
            )
        )
    return made


def outcome(output: RequestOutput) -> Outcome:
    sample = output.outputs[0]
    assert sample.logprobs is not None
    rows = [[(token, entry.logprob) for token, entry in row.items()] for row in sample.logprobs]
    return sample.token_ids, rows, sample.finish_detail


async def outcomes(model: Path, dtype: str, setting: Setting) -> list[Outcome]:
    work = requests()
    order = list(range(len(work)))
    if setting.shuffle:
        random.Random(3).shuffle(order)
    async with cadenza_services(
        model,
        dtype=dtype,
        block_size=setting.block_size,
        num_gpu_blocks=setting.num_gpu_blocks,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        scheduler={"max_inflight_plans": setting.max_inflight_plans, **setting.scheduler},
    ) as running:
        async with AsyncClient(running.target) as client:
            prompts, params = [work[i][0] for i in order], [work[i][1] for i in order]
            if setting.one_by_one:
                results = [(await client.generate([p], [q]))[0] for p, q in zip(prompts, params, strict=True)]
            else:
                results = await client.generate(prompts, params)
        assert ((await running.load()).num_preemptions > 0) is setting.preempts
        await running.wait_until_free()
    by_request = dict(zip(order, results, strict=True))
    return [outcome(by_request[i]) for i in range(len(work))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_same_request_same_bits(tmp_path: Path, dtype: str) -> None:
    model = make_llama(tmp_path / "model", dtype=getattr(torch, dtype))
    expected = await outcomes(model, dtype, Setting("reference"))
    assert len({tuple(tokens) for tokens, _, _ in expected}) == len(expected), "the requests differ"
    for setting in SETTINGS:
        found = await outcomes(model, dtype, setting)
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert ours == theirs, f"{setting.name}: request {index} differs"
