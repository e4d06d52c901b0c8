"""The expected tokens of the simulated executor, computed from the sequence's tokens alone, one by one, without KV.

An independent implementation of the same model in plain integers, without the executor's arrays: tests compare the
two.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.sampling.splitmix64 import GAMMA, MASK, mix
from executor_svc.simulated.ranking import strides
from executor_svc.simulated.tokens import SimulatedContext, rank_logprob


def expected_tokens(
    prompt: Sequence[int],
    sampling: SequenceSampling,
    count: int,
    vocab_size: int,
    *,
    sample_index: int = 0,
    output: Sequence[int] = (),
    adapter_hash: bytes = b"",
) -> list[int]:
    """Return the next `count` tokens after prompt and output; fewer after a stop token or if no token is allowed.

    `sample_index` selects the sample; the one in `sampling` is ignored. `adapter_hash`: as in SimulatedContext.
    """
    context, tokens = SimulatedContext([*prompt, *output], adapter_hash), [int(token) for token in output]
    stops = set(map(int, sampling.stop_token_ids))
    key = mix((int(sampling.seed) + mix((sample_index + GAMMA) & MASK)) & MASK)
    while len(tokens) < len(output) + count:
        value = context.logits_hash()
        if sampling.temperature > 0:
            value = mix((value + key) & MASK)
        token = next(_allowed(value, sampling, tokens, vocab_size), None)
        if token is None:
            break
        tokens.append(token[0])
        if token[0] in stops and len(tokens) >= sampling.min_tokens:
            break
        context.append(token[0])
    return tokens[len(output) :]


def expected_candidates(
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: SequenceSampling,
    count: int,
    vocab_size: int,
    adapter_hash: bytes = b"",
) -> list[tuple[int, float]]:
    """Return the `count` best (token id, logprob) after prompt and output, best first; fewer if fewer are allowed."""
    value = SimulatedContext([*prompt, *output], adapter_hash).logits_hash()
    ranked = _allowed(value, sampling, output, vocab_size)
    return [(token, rank_logprob(value, rank, vocab_size)) for (token, rank), _ in zip(ranked, range(count))]  # noqa: B905


def expected_logprobs(
    token_ids: Sequence[int], index: int, num_top: int, vocab_size: int, adapter_hash: bytes = b""
) -> tuple[float, int, list[int], list[float]]:
    """Return logprob and rank, from 1, of token_ids[index], the best token ids and their logprobs; index: from 1."""
    value = SimulatedContext(token_ids[:index], adapter_hash).logits_hash()
    ranks = range(min(num_top, vocab_size))
    rank = _rank(value, int(token_ids[index]), vocab_size)
    return (
        rank_logprob(value, rank, vocab_size),
        rank + 1,
        [_token(value, other, vocab_size) for other in ranks],
        [rank_logprob(value, other, vocab_size) for other in ranks],
    )


def _allowed(
    value: int, sampling: SequenceSampling, output: Sequence[int], vocab_size: int
) -> Iterator[tuple[int, int]]:
    """Yield (token, rank) of the allowed tokens, best first."""
    ruled_out = _ruled_out(sampling, [int(token) for token in output])
    only = set(map(int, sampling.allowed_token_ids))
    if only:
        ranked = sorted((_rank(value, token, vocab_size), token) for token in only)
    else:
        ranked = ((rank, _token(value, rank, vocab_size)) for rank in range(vocab_size))  # type: ignore[assignment]
    for rank, token in ranked:
        if token not in ruled_out:
            yield token, rank


def _ruled_out(sampling: SequenceSampling, output: list[int]) -> set[int]:
    """Return stop tokens before min_tokens, and the last tokens of bad words that the output has begun."""
    tokens = set(map(int, sampling.stop_token_ids)) if len(output) < sampling.min_tokens else set()
    for word in sampling.bad_words:
        *begin, last = map(int, word)
        if not begin or output[-len(begin) :] == begin:
            tokens.add(last)
    return tokens


def _token(value: int, rank: int, vocab_size: int) -> int:
    return (value % vocab_size + _stride(value, vocab_size)[0] * rank) % vocab_size


def _rank(value: int, token_id: int, vocab_size: int) -> int:
    return (token_id - value % vocab_size) * _stride(value, vocab_size)[1] % vocab_size


def _stride(value: int, vocab_size: int) -> tuple[int, int]:
    """Return the ranking's stride and its inverse."""
    choices = _strides(vocab_size)
    return choices[(value >> 32) % len(choices)]


@functools.cache
def _strides(vocab_size: int) -> list[tuple[int, int]]:
    forward, inverse = strides(vocab_size)
    return list(zip(forward.tolist(), inverse.tolist(), strict=True))
