"""Every SamplingParams field through both services, against transformers; alone, all in one batch, and preempted.

Greedy, fp32, one tiny model: tokens must be those of transformers' `generate` with the processor that means the same.
What else the fields promise is in test_sampling_rules.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from cadenza import SamplingParams
from tests.helpers.models.sampling_reference import (
    EOS,
    LETTERS,
    PROMPT,
    Reference,
    facts,
    letters,
    only,
    params,
    serving,
)
from tests.helpers.scheduler.gate import Gate


class OutputPenalties(LogitsProcessor):
    """Presence and frequency penalties as OpenAI defines them: over the output alone."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        counts = torch.bincount(input_ids[0, len(PROMPT) :], minlength=scores.shape[1])
        return scores - self.frequency * counts - self.presence * (counts > 0)


@dataclasses.dataclass
class Case:
    """A request, and what transformers makes of it."""

    params: SamplingParams
    expected: list[int]
    without: list[int]
    """What it would be without the field."""


def repetition_penalty(reference: Reference) -> Case:
    expected = reference.greedy(RepetitionPenaltyLogitsProcessor(1.4))
    return Case(params(repetition_penalty=1.4), expected, reference.greedy())


def presence_penalty(reference: Reference) -> Case:
    # Two letters alone, so that a penalty decides between them.
    expected = reference.greedy(OutputPenalties(1.9, 0.0), only(LETTERS))
    return Case(params(presence_penalty=1.9, allowed_token_ids=LETTERS), expected, reference.greedy(only(LETTERS)))


def frequency_penalty(reference: Reference) -> Case:
    expected = reference.greedy(OutputPenalties(0.0, 1.7), only(LETTERS))
    return Case(params(frequency_penalty=1.7, allowed_token_ids=LETTERS), expected, reference.greedy(only(LETTERS)))


def negative_penalties(reference: Reference) -> Case:
    expected = reference.greedy(OutputPenalties(-2.0, -1.5), only(LETTERS))
    given = params(presence_penalty=-2, frequency_penalty=-1.5, allowed_token_ids=LETTERS)
    return Case(given, expected, reference.greedy(only(LETTERS)))


def logit_bias(reference: Reference) -> Case:
    plain = reference.greedy()
    biases = {plain[0]: -100.0, plain[3]: -3.5, 40: 4.5, 41: 3.0}
    processor = SequenceBiasLogitsProcessor({(token_id,): bias for token_id, bias in biases.items()})
    return Case(params(logit_bias=biases), reference.greedy(processor), plain)


def allowed_token_ids(reference: Reference) -> Case:
    return Case(params(allowed_token_ids=LETTERS), reference.greedy(only(LETTERS)), reference.greedy())


def bad_words(reference: Reference) -> Case:
    plain = reference.greedy(only(LETTERS))
    words = [plain[:1], plain[4:6], plain[9:12]]
    banned = NoBadWordsLogitsProcessor(words, eos_token_id=EOS)
    given = params(bad_words=[letters(word) for word in words], allowed_token_ids=LETTERS)
    return Case(given, reference.greedy(only(LETTERS), banned), plain)


def min_tokens(reference: Reference) -> Case:
    plain = reference.greedy()
    stop = plain[3]
    floor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 11, eos_token_id=[EOS, stop])
    expected = reference.greedy(floor, eos=[EOS, stop])
    return Case(params(min_tokens=11, stop_token_ids=[stop]), expected, reference.greedy(eos=[EOS, stop]))


def ignore_eos(reference: Reference) -> Case:
    bias = SequenceBiasLogitsProcessor({(EOS,): 9.0})
    given = params(ignore_eos=True, logit_bias={EOS: 9.0})
    return Case(given, reference.greedy(bias, eos=()), reference.greedy(bias))


def everything(reference: Reference) -> Case:
    """All processors on one request, in vLLM's order: masks, bias, repetition, frequency and presence penalty."""
    some = LETTERS[:14]
    plain = reference.greedy(only(some))
    word = plain[2:4]
    expected = reference.greedy(
        SequenceBiasLogitsProcessor({(some[2],): 2.5, (some[3],): -4.0}),
        RepetitionPenaltyLogitsProcessor(1.2),
        OutputPenalties(0.7, 0.4),
        only(some),
        NoBadWordsLogitsProcessor([word], eos_token_id=EOS),
    )
    given = params(
        logit_bias={some[2]: 2.5, some[3]: -4.0}, repetition_penalty=1.2, presence_penalty=0.7, frequency_penalty=0.4,
        allowed_token_ids=some, bad_words=[letters(word)],
    )  # fmt: skip
    return Case(given, expected, plain)


CASES: dict[str, Callable[[Reference], Case]] = {
    maker.__name__: maker
    for maker in (
        repetition_penalty, presence_penalty, frequency_penalty, negative_penalties, logit_bias, allowed_token_ids,
        bad_words, min_tokens, ignore_eos, everything,
    )
}  # fmt: skip


def batch(reference: Reference) -> dict[str, SamplingParams]:
    """A request for every field, those without a case among transformers' processors too."""
    text = letters(reference.greedy(only(LETTERS)))
    spelled = {"allowed_token_ids": LETTERS}
    return {
        **{name: make(reference).params for name, make in CASES.items()},
        "greedy": params(),
        "sampled": params(temperature=0.9, seed=5),
        "top_k": params(temperature=1.3, top_k=5, seed=6),
        "top_p": params(temperature=1.3, top_p=0.7, seed=7),
        "min_p": params(temperature=1.3, min_p=0.2, seed=8),
        "top_n_sigma": params(temperature=1.7, top_n_sigma=1.0, seed=9),
        "logprobs": params(temperature=0.7, seed=9, logprobs=3),
        "prompt_logprobs": params(prompt_logprobs=2, logprobs=0),
        "stop": params(stop=[text[12:15]], **spelled),
        "stop_included": params(stop=[text[12:15]], include_stop_str_in_output=True, **spelled),
        "stop_token_ids": params(stop_token_ids=[LETTERS[text.encode()[14] - ord("a")]], min_tokens=12, **spelled),
        "detokenize": params(detokenize=False, logprobs=1),
        "special": params(skip_special_tokens=False, ignore_eos=True, logit_bias={EOS: 9.0}),
        "truncate": params(truncate_prompt_tokens=13, prompt_logprobs=0),
        "priority": params(priority=-7),
    }


async def test_each_field_against_transformers(reference: Reference) -> None:
    cases = {name: make(reference) for name, make in CASES.items()}
    async with serving(reference) as client:
        outputs = await client.generate([PROMPT] * len(cases), [case.params for case in cases.values()])
    for (name, case), output in zip(cases.items(), outputs, strict=True):
        assert output.outputs[0].token_ids == case.expected, name
        assert case.expected != case.without, f"{name} makes no difference here: the test would prove nothing"


async def test_all_fields_in_one_batch_change_nothing_for_each_other(reference: Reference) -> None:
    given = batch(reference)
    async with serving(reference) as client:
        alone = [(await client.generate([PROMPT], one))[0] for one in given.values()]
        together = await client.generate([PROMPT] * len(given), list(given.values()))
    for name, one, other in zip(given, alone, together, strict=True):
        assert facts(other) == facts(one), name


async def test_no_field_notices_a_preemption(reference: Reference) -> None:
    """Behind an older request that grows, in a pool that cannot hold both: the younger one is preempted."""
    given = batch(reference)
    async with serving(reference) as client:
        undisturbed = await client.generate([PROMPT] * len(given), list(given.values()))
    old, gate = params(max_tokens=40, ignore_eos=True), Gate()
    tight = {"num_gpu_blocks": 6, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    async with serving(reference, gate=gate, **tight) as client:
        for (name, one), expected in zip(given.items(), undisturbed, strict=True):
            _, output = await gate.generate(client, [PROMPT[:8], PROMPT], [old, one])
            assert expected.metrics.num_preemptions == 0
            assert output.metrics.num_preemptions > 0, name
            assert facts(output) == facts(expected), name


@pytest.mark.parametrize("num_top", [0, 4])
async def test_prompt_logprobs_under_chunks_and_preemption(reference: Reference, num_top: int) -> None:
    """The prompt is preempted in its middle, some rows known: each comes once, with transformers' values."""
    prompt = (PROMPT * 2)[:40]
    logprobs = torch.log_softmax(reference.logits(prompt), dim=-1)
    given = params(max_tokens=1, prompt_logprobs=num_top, logprobs=num_top)
    old, gate = params(max_tokens=30, ignore_eos=True), Gate()
    tight = {"num_gpu_blocks": 6, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    async with serving(reference, gate=gate, **tight) as client:
        alone = (await client.generate([prompt], given))[0]
        _, output = await gate.generate(client, [PROMPT[:5], prompt], [old, given])
        deltas = [delta async for delta in client.stream(prompt, given)]
    assert output.metrics.num_preemptions > 0
    assert facts(output) == facts(alone)
    assert [row for delta in deltas for row in delta.prompt_logprobs or []] == output.prompt_logprobs
    assert len(deltas) > 1, "they stream as the chunks are computed"
    rows = output.prompt_logprobs
    assert len(rows) == 40
    assert rows[0] is None
    for index, row in enumerate(rows[1:], start=1):
        before = logprobs[index - 1]
        best = before.topk(num_top).indices.tolist()
        assert list(row) == list(dict.fromkeys([prompt[index], *best]))
        for token_id, entry in row.items():
            assert entry.logprob == pytest.approx(float(before[token_id]), abs=2e-4)
            assert entry.rank == 1 + int((before > before[token_id]).sum())
    assert rows[1][prompt[1]].decoded_token == letters(prompt[1:2])
