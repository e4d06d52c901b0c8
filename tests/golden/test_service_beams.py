"""Beams through both services over gRPC: tokens, order and scores of transformers' generate, in fp32.

Many searches at once, of all widths and kinds of ends, beside requests that sample: with room for all of them, over
cached prompts, and in pools so small that searches are preempted, by recompute and by swap.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import AsyncClient, RequestOutput, SamplingParams
from cadenza.steps.watch import StepWatch, watch_steps
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import NUM_THREADS
from tests.helpers.marks import short_and_long
from tests.helpers.models.golden import transformers_model
from tests.helpers.scheduler.gate import Gate
from tests.helpers.services import cadenza_services

EOS, MAX_TOKENS, MAX_MODEL_LEN = 1, 24, 56
WIDTHS = (2, 3, 5, 8)
LENGTH_PENALTIES = (1.0, 0.0, 2.0, -0.5, 0.7)
STOPPING: tuple[Any, ...] = (False, True, "never")

# Small vocabularies, so that beams meet their stop ids at all lengths; never fewer ids than beams and stop ids.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "seed": 2, "vocab_size": 23},
    "llama, flat": {"family": "llama", "seed": 8, "vocab_size": 67, "initializer_range": 0.1},
    "qwen3": {"family": "qwen3", "seed": 8, "vocab_size": 41},
    "gemma2": {"family": "gemma2", "seed": 8, "vocab_size": 50},
    "lfm2": {"family": "lfm2", "seed": 8, "vocab_size": 41},
    "qwen3.5": {"family": "qwen3_5_delta", "seed": 8, "vocab_size": 41},
}
ROOMY = {"num_gpu_blocks": 1000, "num_cpu_blocks": 0}
TIGHT = {
    "recompute": {"num_gpu_blocks": 48, "num_cpu_blocks": 0},
    "swap": {"num_gpu_blocks": 48, "num_cpu_blocks": 500},
}

SMALLER = {"qwen3.5": {"num_gpu_blocks": 8}}
"""Beside the states of all that run, which not all of them fill at once."""


@dataclass(frozen=True)
class Search:
    """A request for beams."""

    prompt: list[int]
    params: SamplingParams

    @property
    def stop_ids(self) -> list[int]:
        return self.params.stop_token_ids if self.params.ignore_eos else [EOS, *self.params.stop_token_ids]

    @property
    def limits(self) -> dict[str, int]:
        """Most output tokens, by the reason to end there."""
        room = {"max_model_len": MAX_MODEL_LEN - len(self.prompt)}
        return {"max_tokens": self.params.max_tokens, **room} if self.params.max_tokens else room


@dataclass(frozen=True)
class Answer:
    """What transformers found: outputs and their scores, best first."""

    outputs: list[list[int]]
    scores: list[float]


def searches(vocabulary: int) -> list[Search]:
    """All widths with all kinds of early stopping; every other prompt begins like the others do."""
    rng = random.Random(5)
    shared = [rng.randrange(2, vocabulary) for _ in range(17)]
    made = []
    for index, (width, stopping) in enumerate((width, stopping) for width in WIDTHS for stopping in STOPPING):
        prompt = [rng.randrange(2, vocabulary) for _ in range(rng.randint(1, 22))]
        params = SamplingParams(
            temperature=0.0,
            beam_width=width,
            n=rng.choice([1, width, width]),
            length_penalty=LENGTH_PENALTIES[index % len(LENGTH_PENALTIES)],
            early_stopping=stopping,
            stop_token_ids=rng.sample(range(2, vocabulary), index % 3),
            ignore_eos=index % 4 == 3,
            min_tokens=rng.choice([0, 0, 4]),
            max_tokens=MAX_TOKENS if index % 5 else None,
        )
        made.append(Search(shared + prompt if index % 2 else prompt, params))
    return made


def by_transformers(model: Any, search: Search) -> Answer:
    ids, params = torch.tensor([search.prompt]), search.params
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=params.beam_width,
            num_return_sequences=params.n,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=search.stop_ids or None,
            pad_token_id=0,
            max_new_tokens=min(search.limits.values()),
            min_new_tokens=params.min_tokens or None,
            return_dict_in_generate=True,
            output_scores=True,
        )
    # Padding may look like a token; only tokens have a beam that they come from.
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    rows = out.sequences[:, len(search.prompt) :].tolist()
    return Answer([row[:length] for row, length in zip(rows, lengths, strict=True)], out.sequences_scores.tolist())


@dataclass(frozen=True)
class Golden:
    """A checkpoint, and transformers' answers of it."""

    folder: Path
    searches: list[Search]
    answers: list[Answer]
    pools: dict[str, int]
    """Small ones that are its own."""

    @property
    def others(self) -> list[tuple[list[int], SamplingParams]]:
        """Requests that run beside them, and do other things."""
        prompt = self.searches[1].prompt
        return [
            (prompt, SamplingParams(temperature=0.0, max_tokens=30, logprobs=2)),
            (prompt[:9], SamplingParams(n=3, seed=1, max_tokens=20, ignore_eos=True)),
            (prompt[:4], SamplingParams(best_of=4, n=2, seed=2, max_tokens=20, repetition_penalty=1.2)),
        ]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=short_and_long(CHECKPOINTS, ["llama", "qwen3.5"]))
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    folder = make_checkpoint(tmp_path_factory.mktemp("beams"), **CHECKPOINTS[request.param])
    model = transformers_model(folder)
    model.generation_config.eos_token_id = None
    requests = searches(model.config.vocab_size)
    answers = [by_transformers(model, search) for search in requests]
    return Golden(folder, requests, answers, SMALLER.get(request.param, {}))


@asynccontextmanager
async def serving(golden: Golden, preemption: str, gate: Gate, **pools: int) -> AsyncIterator[AsyncClient]:
    async with (
        cadenza_services(
            golden.folder,
            gate=gate,
            dtype="float32",
            speculative="off",  # beams have no drafts, and states are smaller
            block_size=8,
            max_num_seqs=64,
            max_num_batched_tokens=96,
            num_threads=NUM_THREADS,
            scheduler={"preemption": preemption, "max_model_len": MAX_MODEL_LEN},
            **pools,
        ) as running,
        AsyncClient(running.target) as client,
    ):
        yield client
        await running.wait_until_free()


async def generate(client: AsyncClient, gate: Gate, golden: Golden) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """All at once: the searches' outputs, and the others'."""
    requests = [(search.prompt, search.params) for search in golden.searches]
    requests[4:4] = golden.others
    prompts, params = zip(*requests, strict=True)
    outputs = await gate.generate(client, prompts, params)
    return outputs[:4] + outputs[7:], outputs[4:7]


def check(golden: Golden, outputs: list[RequestOutput]) -> None:
    """They are transformers' answers, each with the end that it must have."""
    for search, answer, output in zip(golden.searches, golden.answers, outputs, strict=True):
        params = search.params
        assert [sample.token_ids for sample in output.outputs] == answer.outputs, search
        scores = [
            sample.cumulative_logprob / len(sample.token_ids) ** params.length_penalty for sample in output.outputs
        ]
        assert scores == pytest.approx(answer.scores, rel=1e-4, abs=1e-4), search
        for sample in output.outputs:
            last = sample.token_ids[-1]
            if last in search.stop_ids:
                assert sample.finish_detail == ("eos" if last == EOS else "stop_token")
                assert sample.stop_reason == (None if last == EOS else last)
            else:
                assert sample.finish_detail == min(search.limits, key=search.limits.__getitem__)


def reported(output: RequestOutput) -> list[Any]:
    return [(sample.token_ids, sample.logprobs, sample.cumulative_logprob) for sample in output.outputs]


def num_preemptions(outputs: list[RequestOutput]) -> int:
    return sum(output.metrics.num_preemptions for output in outputs if output.metrics)


def num_searches_swapped(watch: StepWatch, outputs: list[RequestOutput]) -> int:
    """How many of these requests were swapped out."""
    request_of = {joined.sequence_id: joined.request_id for record in watch.records for joined in record.joined}
    gone = {request_of[sequence_id] for record in watch.records for sequence_id in record.swapped_out_ids}
    return len(gone & {output.request_id for output in outputs})


async def test_with_room_for_all(golden: Golden) -> None:
    gate = Gate()
    async with serving(golden, "recompute", gate, **ROOMY) as client:
        outputs, _ = await generate(client, gate, golden)
        again, _ = await generate(client, gate, golden)
    check(golden, outputs)
    check(golden, again)
    ends = {sample.finish_detail for output in outputs for sample in output.outputs}
    assert ends == {"eos", "stop_token", "max_tokens", "max_model_len"}
    assert num_preemptions(outputs) == 0
    assert [output.num_cached_tokens for output in again] == [
        (len(search.prompt) - 1) // 8 * 8 for search in golden.searches
    ]


@pytest.mark.parametrize("preemption", TIGHT)
async def test_preempted(golden: Golden, preemption: str) -> None:
    gate = Gate()
    pools = TIGHT[preemption] | golden.pools
    async with serving(golden, preemption, gate, **pools) as client, watch_steps(client) as watch:
        outputs, others = await generate(client, gate, golden)
        alone = [(await client.generate([prompt], [params]))[0] for prompt, params in golden.others]
        # They came after all the others had left.
        await watch.wait_left(sum(search.params.beam_width or 0 for search in golden.searches), 10.0)
    check(golden, outputs)
    assert [reported(output) for output in others] == [reported(output) for output in alone]
    assert num_preemptions(outputs) > 0
    assert num_preemptions(alone) == 0
    num_swapped = num_searches_swapped(watch, outputs)
    assert num_swapped > 0 if preemption == "swap" else num_swapped == 0
