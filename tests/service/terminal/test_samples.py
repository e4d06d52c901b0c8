"""Parallel samples, best_of, beams and the prefix cache through both services, over real gRPC, on a tiny model."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from transformers import MinNewTokensLengthLogitsProcessor, SequenceBiasLogitsProcessor

from cadenza import AsyncClient, CompletionOutput, InvalidRequestError, RequestOutput, SamplingParams
from cadenza.steps.watch import watch_steps
from tests.helpers.models.sampling_reference import EOS, NUM_TOKENS, PROMPT, ROOMY, Reference, params, serving
from tests.helpers.scheduler.gate import Gate
from tests.helpers.services import cadenza_services

TIGHT = {"num_gpu_blocks": 24, "block_size": 8}


def drawn(**given: Any) -> SamplingParams:
    """Sampling of which all tokens are drawn."""
    return params(**{"temperature": 1.0, "seed": 5, "ignore_eos": True, **given})


def ids(output: RequestOutput) -> list[list[int]]:
    assert [sample.index for sample in output.outputs] == list(range(len(output.outputs)))
    return [sample.token_ids for sample in output.outputs]


def total(sample: CompletionOutput) -> float:
    """The sum of its tokens' logprobs."""
    return sum(row[token_id].logprob for token_id, row in zip(sample.token_ids, sample.logprobs, strict=True))


@asynccontextmanager
async def tightly(reference: Reference, preemption: str, **options: Any) -> AsyncIterator[AsyncClient]:
    """Both services with so few blocks that requests are preempted."""
    options = ROOMY | TIGHT | options
    scheduler = {"preemption": preemption}
    async with (
        cadenza_services(reference.folder, dtype="float32", scheduler=scheduler, **options) as running,
        AsyncClient(running.target) as client,
    ):
        yield client
        await running.wait_until_free()


# --- samples ---------------------------------------------------------------------------------------------------------


async def test_samples_of_one_prompt(reference: Reference) -> None:
    """Each is what it is however many others are drawn, and whatever else runs."""
    async with serving(reference) as client:
        (three,) = await client.generate(PROMPT, drawn(n=3))
        one, two, three_again, greedy = await client.generate(
            [PROMPT] * 4, [drawn(), drawn(n=2), drawn(n=3, logprobs=2), params()]
        )
    samples = ids(three)
    assert all(len(sample) == NUM_TOKENS for sample in samples)
    assert len({tuple(sample) for sample in samples}) == 3
    assert ids(one) == samples[:1]
    assert ids(two) == samples[:2]
    assert ids(three_again) == samples
    assert ids(greedy) == [reference.greedy()]
    assert [sample.text for sample in three_again.outputs] == [sample.text for sample in three.outputs]
    assert three.metrics.num_completion_tokens == 3 * NUM_TOKENS
    assert [sample.cumulative_logprob for sample in three.outputs] == [None] * 3
    for sample in three_again.outputs:
        assert sample.cumulative_logprob == pytest.approx(total(sample))


async def test_samples_are_streamed_each_to_its_own_end(reference: Reference) -> None:
    async with serving(reference) as client:
        (whole,) = await client.generate(PROMPT, drawn(n=3))
        first, second, third = ids(whole)
        place, stop = next((i, token) for i, token in enumerate(second) if token not in (*first, *third) and i > 2)
        deltas = [delta async for delta in client.stream(PROMPT, drawn(n=3, stop_token_ids=[stop]))]
    samples: list[list[int]] = [[], [], []]
    ends: dict[int, tuple[str | None, int | str | None]] = {}
    for part in itertools.chain.from_iterable(delta.outputs for delta in deltas):
        assert part.index not in ends, "something came after the end"
        samples[part.index] += part.token_ids
        if part.finish_reason:
            ends[part.index] = part.finish_detail, part.stop_reason
    assert samples == [first, second[: second.index(stop) + 1], third]
    assert place < NUM_TOKENS
    assert ends == {0: ("max_tokens", None), 1: ("stop_token", stop), 2: ("max_tokens", None)}
    assert len(deltas) > 3
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]


async def test_a_stop_string_ends_its_sample_alone(reference: Reference) -> None:
    async with serving(reference) as client:
        (whole,) = await client.generate(PROMPT, drawn(n=3))
        texts = [sample.text for sample in whole.outputs]
        stop = next(
            texts[1][at : at + 2] for at in range(2, len(texts[1])) if texts[1][at : at + 2] not in texts[0] + texts[2]
        )
        (stopped,) = await client.generate(PROMPT, drawn(n=3, stop=stop))
    assert [sample.stop_reason for sample in stopped.outputs] == [None, stop, None]
    assert [sample.text for sample in stopped.outputs] == [texts[0], texts[1][: texts[1].index(stop)], texts[2]]


async def test_an_abort_ends_every_sample(reference: Reference) -> None:
    async with serving(reference) as client:
        ends: dict[int, str | None] = {}
        async for delta in client.stream(PROMPT, drawn(n=3, max_tokens=200), request_id="long"):
            if not ends and not delta.finished:
                await client.abort("long")
            ends |= {part.index: part.finish_reason for part in delta.outputs if part.finish_reason}
    assert ends == {0: "abort", 1: "abort", 2: "abort"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
async def test_samples_and_beams_notice_no_preemption(reference: Reference, preemption: str) -> None:
    requests = [drawn(n=3, seed=1), drawn(n=2, seed=2, logprobs=0), params(beam_width=3, n=3), drawn(seed=3), params()]
    async with serving(reference) as client:
        roomy = await client.generate([PROMPT] * 5, requests)
    gate = Gate()
    async with tightly(reference, preemption, num_cpu_blocks=64, gate=gate) as client:
        tight = await gate.generate(client, [PROMPT] * 5, requests)
    assert [ids(output) for output in tight] == [ids(output) for output in roomy]
    assert [[sample.cumulative_logprob for sample in output.outputs] for output in tight] == [
        [sample.cumulative_logprob for sample in output.outputs] for output in roomy
    ]
    assert sum(output.metrics.num_preemptions for output in roomy) == 0
    assert sum(output.metrics.num_preemptions for output in tight) > 0


async def test_swaps_are_in_the_step_records(reference: Reference) -> None:
    gate = Gate()
    async with tightly(reference, "swap", num_cpu_blocks=64, gate=gate) as client, watch_steps(client) as watch:
        outputs = await gate.generate(client, [PROMPT] * 4, [drawn(n=2, seed=seed) for seed in range(4)])
        await watch.wait_left(8, 10.0)
    went = [sequence_id for record in watch.records for sequence_id in record.swapped_out_ids]
    returned = [sequence_id for record in watch.records for sequence_id in record.swapped_in_ids]
    preempted = [sequence_id for record in watch.records for sequence_id in record.preempted_ids]
    assert went
    assert sorted(returned) == sorted(went)
    assert set(went) <= set(preempted)
    moving = [record for record in watch.records if record.swapped_out_ids or record.swapped_in_ids]
    assert all(record.timings.moves_ns > 0 for record in moving)
    assert max(record.load.num_swapped for record in watch.records) > 0
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


async def test_what_can_never_fit_is_refused_with_the_numbers(reference: Reference) -> None:
    async with serving(reference, **TIGHT) as client:
        with pytest.raises(InvalidRequestError, match=r"\b24\b"):
            await client.generate(PROMPT, drawn(n=30))
        with pytest.raises(InvalidRequestError, match=r"\b24\b"):
            await client.generate(PROMPT, params(beam_width=30))


# --- best_of ---------------------------------------------------------------------------------------------------------


async def test_the_best_of_many(reference: Reference) -> None:
    async with serving(reference) as client:
        every, best, with_logprobs = await client.generate(
            [PROMPT] * 3, [drawn(n=6, logprobs=0), drawn(n=2, best_of=6), drawn(n=2, best_of=6, logprobs=1)]
        )
        deltas = [delta async for delta in client.stream(PROMPT, drawn(n=2, best_of=6))]
    ranked = sorted(every.outputs, key=lambda sample: -sample.cumulative_logprob)[:2]
    assert ranked != every.outputs[:2], "the order is not that of the draws"
    for output in (best, with_logprobs):
        assert ids(output) == [sample.token_ids for sample in ranked]
        assert [sample.cumulative_logprob for sample in output.outputs] == [s.cumulative_logprob for s in ranked]
        assert output.metrics.num_completion_tokens == 6 * NUM_TOKENS
    assert [sample.logprobs for sample in best.outputs] == [None, None]
    assert [total(sample) for sample in with_logprobs.outputs] == pytest.approx([s.cumulative_logprob for s in ranked])
    (last,) = [delta for delta in deltas if delta.outputs]
    assert last.finished
    assert ids(last) == ids(best)


# --- beams -----------------------------------------------------------------------------------------------------------


def beams(
    reference: Reference, width: int, stops: Sequence[int], processors: Sequence[Any] = (), **options: Any
) -> Any:
    """(outputs, best first, and their scores) of transformers' `generate`, all `width` of them."""
    prompt = torch.tensor([PROMPT])
    out = reference.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), num_beams=width, num_return_sequences=width, do_sample=False,
        max_new_tokens=NUM_TOKENS, pad_token_id=-1, eos_token_id=list(stops), return_dict_in_generate=True,
        output_scores=True, logits_processor=list(processors), **options,
    )  # fmt: skip
    found = [[token for token in row[len(PROMPT) :] if token >= 0] for row in out.sequences.tolist()]
    return found, out.sequences_scores.tolist()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stopping", [False, True, "never"])
async def test_beams_are_those_of_transformers(reference: Reference, stopping: Any) -> None:
    """Several searches at once, beside samples: tokens, order, scores and ends, the text too."""
    first = reference.greedy()
    # Often among the best, so that beams end at all lengths.
    stops = sorted({EOS, first[4], first[9]})
    searches = [(4, 1.0), (3, -0.5), (2, 2.0), (8, 0.0)]
    given = [
        params(beam_width=w, n=w, length_penalty=p, early_stopping=stopping, stop_token_ids=stops) for w, p in searches
    ]
    async with serving(reference) as client:
        *outputs, sampled = await client.generate([PROMPT] * 5, [*given, drawn(n=2)])
    details = set()
    for (width, penalty), output in zip(searches, outputs, strict=True):
        expected, scores = beams(reference, width, stops, length_penalty=penalty, early_stopping=stopping)
        assert ids(output) == expected
        mine = [s.cumulative_logprob / len(s.token_ids) ** penalty for s in output.outputs]
        assert mine == pytest.approx(scores, abs=1e-4)
        details |= {sample.finish_detail for sample in output.outputs}
        assert output.metrics.num_completion_tokens == sum(map(len, expected))
    assert "stop_token" in details
    assert len(sampled.outputs) == 2


async def test_beams_are_ranked_by_what_the_processors_leave(reference: Reference) -> None:
    first = reference.greedy()
    biases = {first[0]: -3.0, EOS: 4.0}
    processors = [
        SequenceBiasLogitsProcessor({(token_id,): bias for token_id, bias in biases.items()}),
        MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, eos_token_id=[EOS]),
    ]
    async with serving(reference) as client:
        (output,) = await client.generate(PROMPT, params(beam_width=4, n=4, logit_bias=biases, min_tokens=6))
    expected, _ = beams(reference, 4, [EOS], processors)
    assert ids(output) == expected
    assert all(len(sample.token_ids) > 6 for sample in output.outputs)


async def test_only_the_n_best_beams_are_returned_and_nothing_before_the_end(reference: Reference) -> None:
    async with serving(reference) as client:
        (all_four,) = await client.generate(PROMPT, params(beam_width=4, n=4))
        deltas = [delta async for delta in client.stream(PROMPT, params(beam_width=4, n=2, prompt_logprobs=0))]
    (last,) = [delta for delta in deltas if delta.outputs]
    assert last.finished
    assert ids(last) == ids(all_four)[:2]
    assert [sample.text for sample in last.outputs] == [sample.text for sample in all_four.outputs[:2]]
    rows = [row for delta in deltas for row in delta.prompt_logprobs or ()]
    assert len(rows) == len(PROMPT)


# --- the prefix cache ------------------------------------------------------------------------------------------------


async def test_prompts_that_start_alike_share_what_is_cached(reference: Reference) -> None:
    """All full blocks but for the last token's; never for those who opt out, nor beyond a salt."""
    salted = {"prompt_token_ids": PROMPT, "cache_salt": "mine"}
    async with serving(reference) as client:

        async def cached(prompt: Any, given: SamplingParams | None = None, **options: Any) -> int:
            (output,) = await client.generate([prompt], given or params(), **options)
            tokens.append(ids(output)[0])
            return output.num_cached_tokens

        tokens: list[list[int]] = []
        assert await cached(PROMPT, enable_prefix_caching=False) == 0
        assert await cached(PROMPT) == 0, "who opts out fills nothing"
        assert await cached(PROMPT) == 16
        assert await cached(PROMPT, enable_prefix_caching=False) == 0
        assert await cached(salted) == 0
        assert await cached(salted) == 16
        assert await cached([*PROMPT[:11], *PROMPT]) == 8
        assert await cached(PROMPT, params(prompt_logprobs=0)) == 0, "its logprobs are to be computed"
        (three,) = await client.generate(PROMPT, drawn(n=3))
        assert three.num_cached_tokens == 16
        load = (await client.server_info()).load
    assert tokens[:6] == [reference.greedy()] * 6
    assert load.num_prefix_hits == 3 * 16 + 8
    assert load.num_prefix_queries > load.num_prefix_hits
    assert load.num_cached_device_blocks > 0
    assert load.num_used_device_blocks == 0


async def test_the_second_turn_of_a_chat_finds_the_first(reference: Reference) -> None:
    async with serving(reference) as client:
        (first,) = await client.generate(PROMPT, params(ignore_eos=True))
        history = [*PROMPT, *ids(first)[0]]
        (second,) = await client.generate([*history, 40, 41, 42], params())
    assert second.num_cached_tokens == (len(history) - 1) // 8 * 8
