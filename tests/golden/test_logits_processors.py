"""Each logits processor against transformers' own, on random logits: the values, and the greedy token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.batch.slots import Slots
from executor_svc.sampling.columns import sampling_columns
from executor_svc.sampling.logits_edits import logits_edits
from executor_svc.sampling.logits_processors import process
from executor_svc.sampling.row_math import argmax
from tests.helpers.executor.cpu_sampling import choose, sample
from tests.helpers.executor.plans import ints, plan, scheduled, sequence
from tests.helpers.scheduler.fake_executor import LIMITS

VOCAB = LIMITS.vocab_size
HISTORIES = [
    ([3, 4, 5, 3], []),
    ([1], [7]),
    ([7, 8, 9], [9, 9, 9, 7, 30]),
    ([0, 49], [10, 11, 12]),
    (list(range(20)), [11, 12, 10, 11]),
]
"""Prompt and output of each row."""


def slots_with(sampling: SequenceSampling) -> tuple[Slots, Any]:
    """A sequence with each history, all about to sample, and what is scheduled."""
    slots = Slots(LIMITS)
    admitted, rows = [], []
    for slot, (prompt, output) in enumerate(HISTORIES):
        tokens = prompt + output
        blocks = list(range(8 * slot, 8 * slot + 8))
        admitted.append(sequence(slot, tokens, blocks, prompt=len(prompt), sampling=sampling))
        rows.append((slot, len(tokens), True))
    step = plan(admitted=tuple(admitted), scheduled=scheduled(*rows))
    slots.apply(step)
    return slots, slots.schedule(step)


def ours(sampling: SequenceSampling, logits: Tensor) -> tuple[Tensor, list[int]]:
    """The edited logits of every row, and the tokens chosen."""
    slots, got = slots_with(sampling)
    edited = logits.clone()
    edits = logits_edits(slots, got.slots)
    if edits is not None:
        edited[torch.from_numpy(edits.rows)] = process(logits, edits)
    return edited, sample(logits, sampling_columns(slots, got)).token_ids.tolist()


def candidates(sampling: SequenceSampling, logits: Tensor, count: int) -> list[tuple[list[int], list[float]]]:
    """The candidates of every row: token ids and logprobs."""
    slots, got = slots_with(replace(sampling, num_candidates=count))
    found = choose(logits, argmax(logits), slots, got).candidates
    assert found is not None
    assert (found.errors == 0).all()
    rows = zip(found.token_ids, found.logprobs, found.counts, strict=True)
    return [(ids[:n].tolist(), logprobs[:n].tolist()) for ids, logprobs, n in rows]


def biased(bias: dict[int, float]) -> dict[str, Any]:
    return {"bias_token_ids": ints(*bias), "biases": np.array(list(bias.values()), np.float32)}


BIAS = {4: 2.5, 0: -3.0, 49: 40.0, 17: -100.0}
WORDS = [[5], [9, 9], [9, 7, 30, 2], [10, 11, 12], [11, 12], [7, 8], [10, 11, 0], [3, 3, 3]]
SUPPRESSED = [token for token in range(VOCAB) if token % 3]


def by_transformers(name: str, logits: Tensor) -> Tensor:
    """Row by row, with prompt and output as input, or the output alone where it alone is looked at."""
    rows = []
    for row, (prompt, output) in zip(logits, HISTORIES, strict=True):
        whole, only_output = torch.tensor([prompt + output]), torch.tensor([output], dtype=torch.int64)
        match name:
            case "repetition_penalty":
                made, ids = theirs.RepetitionPenaltyLogitsProcessor(1.3), whole
            case "repetition_reward":
                made, ids = theirs.RepetitionPenaltyLogitsProcessor(0.6), whole
            case "bad_words":
                # Behind what is in no word: transformers 5.17 overlooks words that would be all of its input.
                made, ids = (
                    theirs.NoBadWordsLogitsProcessor(WORDS),
                    torch.nn.functional.pad(only_output, (9, 0), value=-1),
                )
            case "logit_bias":
                made, ids = theirs.SequenceBiasLogitsProcessor({(t,): b for t, b in BIAS.items()}), whole
            case "allowed_token_ids":
                made, ids = theirs.SuppressTokensLogitsProcessor(SUPPRESSED), whole
            case "min_tokens":
                made, ids = theirs.MinNewTokensLengthLogitsProcessor(len(prompt), 4, [2, 31, 44]), whole
        rows.append(made(ids, row[None].clone()))
    return torch.cat(rows)


SAMPLINGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "repetition_reward": {"repetition_penalty": 0.6},
    "bad_words": {"bad_words": tuple(ints(*word) for word in WORDS)},
    "logit_bias": biased(BIAS),
    "allowed_token_ids": {"allowed_token_ids": ints(*sorted(set(range(VOCAB)) - set(SUPPRESSED)))},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": ints(2, 31, 44)},
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("seed", range(8))
def test_values_and_greedy_tokens_are_those_of_transformers(name: str, seed: int) -> None:
    logits = torch.randn(len(HISTORIES), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    expected = by_transformers(name, logits)
    edited, tokens = ours(SequenceSampling(**SAMPLINGS[name]), logits)
    assert not torch.equal(expected, logits)
    torch.testing.assert_close(edited, expected, rtol=1e-6, atol=0)
    assert tokens == expected.argmax(dim=1).tolist()


# In our order: bias before penalties.
TOGETHER = ["logit_bias", "repetition_penalty", "allowed_token_ids", "bad_words", "min_tokens"]


@pytest.mark.parametrize("names", [[], *([name] for name in SAMPLINGS), TOGETHER], ids=" ".join)
@pytest.mark.parametrize("seed", range(4))
def test_candidates_are_those_of_transformers_beam_search(names: list[str], seed: int) -> None:
    """There the processors change log-probabilities, not logits: `_beam_search` in generation/utils.py."""
    logits = torch.randn(len(HISTORIES), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    expected = torch.nn.functional.log_softmax(logits, dim=1)
    for name in names:
        expected = by_transformers(name, expected)
    sampling = SequenceSampling(**{key: value for name in names for key, value in SAMPLINGS[name].items()})
    for (ids, logprobs), row in zip(candidates(sampling, logits, 20), expected, strict=True):
        best = row.topk(20)
        left = best.values.isfinite()
        assert ids == best.indices[left].tolist()
        np.testing.assert_allclose(logprobs, best.values[left], rtol=1e-5, atol=1e-5)


def test_words_are_matched_in_the_output_only() -> None:
    """transformers looks at the prompt too, vLLM does not: [3, 3, 3] and [7, 8] are begun in prompts alone."""
    edited, _ = ours(SequenceSampling(bad_words=(ints(3, 9), ints(7, 8, 9, 40))), torch.zeros(len(HISTORIES), VOCAB))
    assert not edited.isinf().any()
