"""Checks of a sequence's sampling parameters against the executor's limits and features. All raise InvalidPlan."""

from __future__ import annotations

import math

import numpy as np

from executor_svc.plan.column_checks import check_range, check_unique
from executor_svc.plan.plan import InvalidPlan, Limits, SequenceSampling

# A beam search of width w asks for 2 w: beams that end with EOS leave w others.
MAX_CANDIDATES = 2 * 128


def check_sampling(sampling: SequenceSampling, limits: Limits, where: str) -> None:
    """Every field in its range; `where` begins the messages."""
    most = min(MAX_CANDIDATES, limits.vocab_size)
    if not 0 <= sampling.num_candidates <= most:
        raise InvalidPlan(f"{where}: num_candidates {sampling.num_candidates} is not 0 to {most}")
    _check_numbers(sampling, where)
    for name, value in (
        ("num_logprobs", sampling.num_logprobs),
        ("num_prompt_logprobs", sampling.num_prompt_logprobs),
    ):
        if value is not None and not 0 <= value <= limits.max_logprobs:
            raise InvalidPlan(f"{where}: {name} {value} is not 0 to max_logprobs {limits.max_logprobs}")
    _check_token_ids(sampling, limits, where)


def _check_numbers(sampling: SequenceSampling, where: str) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidPlan(f"{where}: temperature {sampling.temperature} is not 0 or more and finite")
    if not 0 < sampling.top_p <= 1:
        raise InvalidPlan(f"{where}: top_p {sampling.top_p} is not above 0 and at most 1")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidPlan(f"{where}: min_p {sampling.min_p} is not 0 to 1")
    if not (math.isfinite(sampling.repetition_penalty) and sampling.repetition_penalty > 0):
        raise InvalidPlan(f"{where}: repetition_penalty {sampling.repetition_penalty} is not above 0 and finite")
    for name, value in (
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
    ):
        if not math.isfinite(value):
            raise InvalidPlan(f"{where}: {name} {value} is not finite")


def _check_token_ids(sampling: SequenceSampling, limits: Limits, where: str) -> None:
    vocab = limits.vocab_size
    check_range(sampling.stop_token_ids, vocab, f"{where}: stop token id")
    if sampling.min_tokens and len(np.unique(sampling.stop_token_ids)) >= vocab:
        raise InvalidPlan(f"{where}: every token id is a stop token, so min_tokens leaves none to choose")
    if len(sampling.bias_token_ids) != len(sampling.biases):
        raise InvalidPlan(
            f"{where}: biases: {len(sampling.biases)} values for {len(sampling.bias_token_ids)} bias_token_ids"
        )
    check_range(sampling.bias_token_ids, vocab, f"{where}: bias token id")
    check_unique(sampling.bias_token_ids, f"{where}: bias token id")
    if not np.isfinite(sampling.biases).all():
        bad = np.flatnonzero(~np.isfinite(sampling.biases))[0]
        token_id = sampling.bias_token_ids[bad]
        raise InvalidPlan(f"{where}: biases: {sampling.biases[bad]} of token id {token_id} is not finite")
    check_range(sampling.allowed_token_ids, vocab, f"{where}: allowed token id")
    for index, word in enumerate(sampling.bad_words):
        if not len(word):
            raise InvalidPlan(f"{where}: bad_words: word {index} is empty")
        check_range(word, vocab, f"{where}: bad_words: token id")
