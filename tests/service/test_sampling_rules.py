"""What SamplingParams promise beyond greedy tokens: probabilities, logprobs, seeds, ends, texts, limits, the order."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scipy import stats

from cadenza import InvalidRequestError, SamplingParams
from cadenza.v1 import generation_pb2, types_pb2
from tests.helpers.models.sampling_reference import (
    EOS,
    LETTERS,
    PROMPT,
    ROOMY,
    VOCAB_SIZE,
    Reference,
    facts,
    letters,
    only,
    params,
    serving,
)
from tests.helpers.services import cadenza_services


async def test_whole_vocabulary_prompt_logprobs_of_a_long_prompt_come_in_several_responses(
    reference: Reference,
) -> None:
    prompt = (PROMPT * 20)[:400]
    message = generation_pb2.GenerateRequest(
        prompt=[types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=prompt))],
        sampling_params=types_pb2.SamplingParams(prompt_logprobs=-1, max_tokens=2, temperature=0.0),
        output_mode=generation_pb2.OUTPUT_MODE_FINAL,
    )
    async with cadenza_services(reference.folder, dtype="float32", **ROOMY) as running:
        responses = [response async for response in running.generation.Generate(message)]
    assert len(responses) > 2
    assert all(response.ByteSize() < 1.1 * 2**20 for response in responses)
    next_token = 1
    for response in responses:
        columns = response.prompt_logprobs
        assert response.prompt_logprobs_start == next_token
        next_token += len(columns.chosen_logprobs)
        assert columns.num_top == VOCAB_SIZE
        assert len(columns.top_tokens) == VOCAB_SIZE * len(columns.chosen_logprobs)
    assert next_token == 400
    assert [len(response.outputs) for response in responses] == [0] * (len(responses) - 1) + [1]


async def test_logprobs_are_the_models_own(reference: Reference) -> None:
    """Whatever bends the choice of tokens, logprobs and ranks are those before temperature, masks and penalties."""
    given = params(
        temperature=1.5, seed=3, top_k=4, logprobs=5, prompt_logprobs=0, allowed_token_ids=LETTERS[:14],
        logit_bias={LETTERS[2]: 2.5}, repetition_penalty=1.2, presence_penalty=0.7, frequency_penalty=0.4,
        bad_words=["ab"],
    )  # fmt: skip
    async with serving(reference) as client:
        (output,) = await client.generate([PROMPT], given)
    (sample,) = output.outputs
    token_ids = PROMPT + sample.token_ids
    logprobs = torch.log_softmax(reference.logits(token_ids), dim=-1)
    for place, row in enumerate(sample.logprobs, start=len(PROMPT)):
        before = logprobs[place - 1]
        assert list(row) == list(dict.fromkeys([token_ids[place], *before.topk(5).indices.tolist()]))
        for token_id, entry in row.items():
            assert entry.logprob == pytest.approx(float(before[token_id]), abs=2e-4)
            assert entry.rank == 1 + int((before > before[token_id]).sum())
    chosen = [row[token_id].logprob for row, token_id in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert sample.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-4)


DRAWS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "temperature": ({"temperature": 1.5}, lambda x: x / 1.5),
    "logit_bias": ({"logit_bias": {40: 3.0, 66: -2.0, 90: 7.0}}, lambda x: x + bias_of({40: 3.0, 66: -2.0, 90: 7.0})),
    "allowed_token_ids": (
        {"temperature": 5.0, "allowed_token_ids": [40, 41, 42, 90]},
        lambda x: keep(x, torch.tensor([40, 41, 42, 90])) / 5,
    ),
    "repetition_penalty": ({"repetition_penalty": 2.0}, lambda x: repeated(x, 2.0)),
    "top_k": ({"temperature": 3.0, "top_k": 6}, lambda x: keep(x, x.topk(6).indices) / 3),
    "top_p": ({"temperature": 2.0, "top_p": 0.4}, lambda x: nucleus(x / 2, 0.4)),
    "min_p": ({"temperature": 2.0, "min_p": 0.3}, lambda x: keep(x, at_least(x / 2, 0.3)) / 2),
    "top_n_sigma": (
        {"temperature": 2.0, "top_n_sigma": 1.5},
        lambda x: keep(x, torch.nonzero(x >= x.max() - 1.5 * x.std(correction=0))[:, 0]) / 2,
    ),
}
"""What is requested, and the logits that tokens are then drawn from, spelled out."""


def bias_of(biases: dict[int, float]) -> torch.Tensor:
    return torch.tensor([float(biases.get(token_id, 0.0)) for token_id in range(VOCAB_SIZE)])


def keep(x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, -math.inf).index_copy(0, token_ids, x[token_ids])


def repeated(x: torch.Tensor, penalty: float) -> torch.Tensor:
    x = x.clone()
    seen = torch.tensor(sorted(set(PROMPT)))
    x[seen] = torch.where(x[seen] > 0, x[seen] / penalty, x[seen] * penalty)
    return x


def at_least(x: torch.Tensor, min_p: float) -> torch.Tensor:
    p = x.softmax(0)
    return torch.nonzero(p >= min_p * p.max())[:, 0]


def nucleus(x: torch.Tensor, top_p: float) -> torch.Tensor:
    order = x.argsort(descending=True)
    p = x.softmax(0)[order]
    return keep(x, order[p.cumsum(0) - p < top_p])


@pytest.mark.long
async def test_tokens_are_drawn_with_the_exact_probabilities(reference: Reference) -> None:
    """400 seeds each, fixed; chi-square at 1e-4, tokens expected less than 5 times put together."""
    logits = reference.logits(PROMPT)[-1]
    num_draws = 400
    given = [
        SamplingParams(max_tokens=1, seed=1000 * index + seed, ignore_eos=True, detokenize=False, **fields)
        for index, (fields, _) in enumerate(DRAWS.values())
        for seed in range(num_draws)
    ]
    async with serving(reference, max_num_batched_tokens=32 * len(PROMPT)) as client:
        outputs = await client.generate([PROMPT] * len(given), given)
    tokens = torch.tensor([output.outputs[0].token_ids[0] for output in outputs]).view(len(DRAWS), num_draws)
    for (name, (_, distribution)), drawn in zip(DRAWS.items(), tokens, strict=True):
        expected = distribution(logits).softmax(0) * num_draws
        seen = torch.bincount(drawn, minlength=VOCAB_SIZE).double()
        assert not seen[expected == 0].any(), name
        often = expected >= 5
        pairs = [*zip(seen[often].tolist(), expected[often].tolist(), strict=True)]
        pairs.append((float(seen[~often].sum()), float(expected[~often].sum())))
        pairs = [(a, b) for a, b in pairs if b > 0]
        assert len(pairs) > 2, f"{name}: too few outcomes to prove anything"
        statistic = sum((a - b) ** 2 / b for a, b in pairs)
        assert stats.chi2.sf(statistic, len(pairs) - 1) > 1e-4, name


async def test_a_drawn_seed_is_returned_and_repeats_the_request(reference: Reference) -> None:
    async with serving(reference) as client:
        first, other = await client.generate([PROMPT] * 2, params(temperature=2.0))
        (again,) = await client.generate([PROMPT], params(temperature=2.0, seed=first.seed))
    assert first.seed != other.seed
    assert again.seed == first.seed
    assert again.outputs == first.outputs
    assert first.outputs[0].token_ids != other.outputs[0].token_ids


def first_match(text: str, stop: Sequence[str], min_tokens: int) -> tuple[int, str] | None:
    """Where the output ends and why, for one character per token: after the first token that completes a match."""
    for end in range(min_tokens + 1, len(text) + 1):
        starts = [(end - len(word), place) for place, word in enumerate(stop) if text[:end].endswith(word)]
        if starts:
            return end, stop[min(starts)[1]]
    return None


async def test_stop_strings_across_token_borders(reference: Reference) -> None:
    text = letters(reference.greedy(only(LETTERS), num_tokens=60))
    wanted = [
        (stop, min_tokens, included)
        for stop in ([text[9:12]], [text[9:13], text[10:12]], [text[0]], [text[20]], ["?"], [text[40:48], "?!"])
        for min_tokens in (0, 1, 12, 21)
        for included in (False, True)
    ]
    given = [
        params(
            max_tokens=60, allowed_token_ids=LETTERS, stop=stop, min_tokens=least, include_stop_str_in_output=included
        )
        for stop, least, included in wanted
    ]
    async with serving(reference) as client:
        outputs = await client.generate([PROMPT] * len(given), given)
    for (stop, least, included), output in zip(wanted, outputs, strict=True):
        (sample,) = output.outputs
        found = first_match(text, stop, least)
        if found is None:
            assert (sample.text, sample.finish_reason, sample.stop_reason) == (text, "length", None)
            continue
        end, word = found
        assert sample.text == text[: end if included else end - len(word)], (stop, least, included)
        assert len(sample.token_ids) == end, "tokens go up to the one that completed the match"
        assert (sample.finish_reason, sample.finish_detail, sample.stop_reason) == ("stop", "stop_string", word)


async def test_stop_tokens_eos_and_special_tokens_in_the_text(reference: Reference) -> None:
    plain = reference.greedy(only(LETTERS))
    stop = plain[5]
    text = letters(plain[: plain.index(stop) + 1])
    ending = {"logit_bias": {EOS: 100.0}, "min_tokens": 4}
    given = {
        "stop token": params(allowed_token_ids=LETTERS, stop_token_ids=[stop]),
        "stop token in the text": params(
            allowed_token_ids=LETTERS, stop_token_ids=[stop], include_stop_str_in_output=True
        ),
        "eos": params(**ending),
        "eos in the text": params(**ending, include_stop_str_in_output=True, skip_special_tokens=False),
        "eos skipped": params(**ending, include_stop_str_in_output=True),
        "eos ignored": params(**ending, ignore_eos=True, max_tokens=6),
        "eos shown": params(**ending, ignore_eos=True, max_tokens=6, skip_special_tokens=False),
        "eos as a stop string": params(**ending, ignore_eos=True, skip_special_tokens=False, stop=["</s>"]),
        "no text": params(**ending, detokenize=False, logprobs=1),
    }
    async with serving(reference) as client:
        outputs = dict(zip(given, await client.generate([PROMPT] * len(given), list(given.values())), strict=True))
    samples = {name: output.outputs[0] for name, output in outputs.items()}
    one = samples["stop token"]
    assert (one.text, one.stop_reason, one.finish_detail) == (text[:-1], stop, "stop_token")
    assert one.token_ids[-1] == stop
    assert samples["stop token in the text"].text == text
    ends = samples["eos"]
    assert (ends.token_ids.index(EOS), ends.token_ids[-1], ends.finish_detail, ends.stop_reason) == (
        4,
        EOS,
        "eos",
        None,
    )
    assert samples["eos in the text"].text == ends.text + "</s>"
    assert samples["eos skipped"].text == ends.text
    assert samples["eos ignored"].token_ids[-2:] == [EOS, EOS]
    assert samples["eos ignored"].finish_detail == "max_tokens"
    assert "</s>" not in samples["eos ignored"].text
    assert samples["eos shown"].text.endswith("</s></s>")
    assert (samples["eos as a stop string"].stop_reason, samples["eos as a stop string"].token_ids[-1]) == ("</s>", EOS)
    none = samples["no text"]
    assert (none.text, none.token_ids) == ("", ends.token_ids)
    assert {entry.decoded_token for row in none.logprobs for entry in row.values()} == {None}


async def test_an_output_ends_at_max_tokens_or_at_the_models_length(reference: Reference) -> None:
    wanted = {1: (1, "max_tokens"), 27: (27, "max_tokens"), 28: (27, "max_model_len"), None: (27, "max_model_len")}
    given = [params(max_tokens=most, ignore_eos=True) for most in wanted]
    async with serving(reference, max_model_len=len(PROMPT) + 27) as client:
        outputs = await client.generate([PROMPT] * len(given), given)
    assert [(len(o.outputs[0].token_ids), o.outputs[0].finish_detail) for o in outputs] == [*wanted.values()]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


async def test_a_truncated_prompt_is_its_own_prompt(reference: Reference) -> None:
    async with serving(reference, max_model_len=48) as client:
        cut, same = await client.generate([PROMPT, PROMPT[-13:]], [params(truncate_prompt_tokens=13), params()])
        (most,) = await client.generate([PROMPT * 4], params(truncate_prompt_tokens=-1, max_tokens=20))
        with pytest.raises(InvalidRequestError, match="max_model_len"):
            await client.generate([PROMPT * 4], params(max_tokens=20))
    assert cut.prompt_token_ids == PROMPT[-13:]
    assert cut.outputs == same.outputs
    assert most.prompt_token_ids == (PROMPT * 4)[-28:]
    assert (len(most.outputs[0].token_ids), most.outputs[0].finish_detail) == (20, "max_tokens")


async def test_a_request_whose_limits_leave_no_token_ends_alone(reference: Reference) -> None:
    """Only `a` is allowed, and `aa` is a bad word: nothing can follow the first token."""
    stuck = params(allowed_token_ids=LETTERS[:1], bad_words=["aa"], prompt_logprobs=0)
    async with serving(reference) as client:
        alone = (await client.generate([PROMPT], params()))[0]
        first, other, last = await client.generate([PROMPT] * 3, [params(), stuck, params()])
    assert facts(first) == facts(last) == facts(alone)
    assert (other.outputs[0].token_ids, other.outputs[0].text) == (LETTERS[:1], "a")
    assert (other.outputs[0].finish_reason, other.outputs[0].finish_detail) == ("error", "no_allowed_token")
    assert len(other.prompt_logprobs) == len(PROMPT)


@pytest.mark.parametrize(("order", "expected"), [("priority", "CADB"), ("fcfs", "ABCD")])
async def test_priority_decides_who_goes_first_if_the_order_says_so(
    reference: Reference, order: str, expected: str
) -> None:
    """One at a time. Nothing is planned while the session's first message is read, so all four wait together."""
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 64}
    finished = ""
    async with cadenza_services(
        reference.folder, dtype="float32", scheduler={"order": order}, **(ROOMY | options)
    ) as running:
        blocker = running.generation.Generate(wire_request("blocker", 400, priority=-100))
        while not (await blocker.read()).outputs:
            pass
        session = running.generation.Session()
        for name, priority in {"A": 0, "B": 3, "C": -2, "D": 0}.items():
            await session.write(generation_pb2.SessionRequest(generate=wire_request(name, 3, priority)))
        async with asyncio.timeout(20):
            while (await running.load()).num_waiting < 4:
                pass
        await running.generation.Abort(generation_pb2.AbortRequest(request_id="blocker"))
        while len(finished) < 4:
            finished += "".join(event.request_id for event in (await session.read()).events if event.done)
        await session.done_writing()
        blocker.cancel()
        await running.wait_until_free()
    assert finished == expected


def wire_request(request_id: str, max_tokens: int, priority: int) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        request_id=request_id,
        prompt=[types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=PROMPT))],
        sampling_params=types_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True, priority=priority),
    )
