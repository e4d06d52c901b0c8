"""Edits logits before a token is chosen: allowed tokens, bad words, min_tokens, logit bias, penalties.

The definitions are vLLM's (vllm/v1/sample/sampler.py), in its order:

1. allowed_token_ids: every other token is masked.
2. bad_words: the last token of a word is masked where the output ends with the rest of it; a word of one token
   always. Only the output is matched, not the prompt.
3. min_tokens: stop tokens are masked before that many output tokens.
4. logit_bias is added.
5. repetition_penalty (Keskar et al., "CTRL", 2019), for tokens of prompt and output: positive logits are divided by it,
   others multiplied. Then frequency_penalty times the token's count in the output is subtracted, then
   presence_penalty once if the output contains the token (both as OpenAI's API defines them).

A grammar's mask comes with steps 1 to 3: it masks every token that the grammar does not allow next.

Temperature, min_p, top_k and top_p come after, in the sampler. A masked token has the logit -inf, which no bias or
penalty changes, so steps 1 to 3 can run last. Every step is an elementwise operation in fp32 on single logits, so
a row's bits do not depend on the other rows of the batch. No sum or quotient becomes infinite: it is clamped to the
largest finite number, so that no bias or penalty, however large, masks a token or makes a row impossible to sample.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from executor_svc.plan.arrays import BoolArray, FloatArray, IntArray
from executor_svc.sampling.logits_edits import LogitsEdits, RowTokens
from executor_svc.sampling.masks import Words
from executor_svc.sampling.row_math import source_rows

_LARGEST = torch.finfo(torch.float32).max
_RULED_OUT = float("-inf")


def process(logits: Tensor, edits: LogitsEdits, sources: IntArray | None = None) -> Tensor:
    """Return the edited logits [P, vocab] of the rows `edits.rows`; the logits [L, vocab] fp32 are not changed.

    sources: [R] the logits row that each row of the batch reads; None: its own.
    """
    x = logits.index_select(0, _on(logits, source_rows(edits.rows, sources)))
    flat = x.view(-1)
    if len(edits.biased.ids):
        at = _flat_index(x, edits.biased)
        flat[at] = _bounded(flat[at], flat[at] + _on(x, edits.biases))
    if len(edits.counted.ids):
        at = _flat_index(x, edits.counted)
        flat[at] = _penalise(flat[at], edits)
    if len(edits.allowed.ids):
        at = _flat_index(x, edits.allowed)
        kept = flat[at]
        x[_on(x, np.flatnonzero(np.bincount(edits.allowed.rows)))] = _RULED_OUT
        flat[at] = kept
    if len(edits.forbidden.ids):
        flat[_flat_index(x, edits.forbidden)] = _RULED_OUT
    if len(edits.masked):
        rule_out(x, edits.masked, edits.mask_bits)
    return x


def rule_out(x: Tensor, at: IntArray, bits: Words) -> None:
    """Set the logits of tokens without a bit to -inf, in rows `at` [m] of x [P, vocab]; bits: [m, num_mask_words]."""
    for row, words in zip(at.tolist(), bits, strict=True):
        # A row at a time: what is unpacked stays in the cache.
        without = np.unpackbits(~words.view(np.uint8), count=x.shape[1], bitorder="little")
        x[row].masked_fill_(_on(x, without.view(np.bool_)), _RULED_OUT)


def _penalise(value: Tensor, edits: LogitsEdits) -> Tensor:
    """Return the logits [h] of counted tokens with their three penalties applied."""
    if (edits.repetition_penalty != 1).any():
        repetition = _on(value, edits.repetition_penalty)
        value = _bounded(value, torch.where(value > 0, value / repetition, value * repetition))
    if edits.frequency_penalty.any():
        value = _bounded(value, value - _on(value, edits.frequency_penalty) * _on(value, edits.counts))
    if edits.presence_penalty.any():
        value = _bounded(value, value - _on(value, edits.presence_penalty * (edits.counts > 0)))
    return value


def _bounded(before: Tensor, after: Tensor) -> Tensor:
    """Return the new logits, clamped where they overflowed; masked tokens stay masked."""
    return torch.where(before == _RULED_OUT, before, after.clamp(-_LARGEST, _LARGEST))


def _flat_index(x: Tensor, tokens: RowTokens) -> Tensor:
    return _on(x, tokens.rows * x.shape[1] + tokens.ids)


def _on(x: Tensor, values: IntArray | FloatArray | BoolArray) -> Tensor:
    """Return these values on the device of x."""
    return torch.from_numpy(values).to(x.device)
