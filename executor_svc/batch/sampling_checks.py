"""Checks of a sequence's sampling parameters against the executor's limits and features. All raise InvalidPlan."""

from __future__ import annotations

import numpy as np

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.sampling import COLUMNS, SequenceSampling
from executor_svc.batch.column_checks import check_range, check_unique
from executor_svc.plan.limits import Limits

# A beam search of width w needs 2 w candidates: if w end with EOS, w others remain.
MAX_CANDIDATES = 2 * 128


def check_sampling(sampling: SequenceSampling, limits: Limits, where: str) -> None:
    """Check every field; messages begin with `where`."""
    most = min(MAX_CANDIDATES, limits.vocab_size)
    if not 0 <= sampling.num_candidates <= most:
        raise InvalidPlan(f"{where}: num_candidates {sampling.num_candidates} is not 0 to {most}")
    for name, column in COLUMNS.items():
        if not column.is_valid(value := getattr(sampling, name)):
            raise InvalidPlan(f"{where}: {name} {value} is not {column.must_be}")
    for name in ("num_logprobs", "num_prompt_logprobs"):
        value = getattr(sampling, name)
        if value is not None and not 0 <= value <= limits.max_logprobs:
            raise InvalidPlan(f"{where}: {name} {value} is not 0 to max_logprobs {limits.max_logprobs}")
    _check_token_ids(sampling, limits, where)


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
    biases = np.asarray(sampling.biases, np.float32)
    if not np.isfinite(biases).all():
        bad = np.flatnonzero(~np.isfinite(biases))[0]
        token_id = sampling.bias_token_ids[bad]
        raise InvalidPlan(f"{where}: biases: {biases[bad]} of token id {token_id} is not finite")
    check_range(sampling.allowed_token_ids, vocab, f"{where}: allowed token id")
    for index, word in enumerate(sampling.bad_words):
        if not len(word):
            raise InvalidPlan(f"{where}: bad_words: word {index} is empty")
        check_range(word, vocab, f"{where}: bad_words: token id")
