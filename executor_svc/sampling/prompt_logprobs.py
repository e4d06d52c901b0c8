"""Logprobs of prompt tokens, computed with each chunk of the prompt, in pieces that bound the memory for logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from cadenza_common.plan.result import LogprobColumns
from executor_svc.batch.prompt_rows import PromptColumns, PromptRows, by_slot
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.sampling.functions import RowFunctions
from executor_svc.sampling.logprobs import row_logprobs

# Logits held at once. A chunk of 512 tokens over a vocabulary of 150k would have 300 MB of them.
_PIECE_BYTES = 64 << 20


def prompt_logprobs(
    requested: PromptRows, vocab_size: int, logits: Callable[[IntArray], Tensor], functions: RowFunctions
) -> tuple[dict[int, LogprobColumns], IntArray]:
    """Return one entry for each slot that requested prompt logprobs, and the slots whose logits were not finite.

    Args:
        requested: the prompt tokens of this step.
        vocab_size: width of the logits.
        logits: returns the logits [n, vocab_size] float32 of n of `requested.rows`; a row's bits must not depend on n.
        functions: the device's.
    """
    num_top = np.repeat(requested.num_top, requested.counts)
    top_ends = np.cumsum(num_top)
    num_rows, num_best = len(num_top), int(top_ends[-1])
    columns = PromptColumns(
        np.empty(num_rows, np.float32),
        np.empty(num_rows, np.int64),
        np.empty(num_best, np.int64),
        np.empty(num_best, np.float32),
    )
    finite = np.ones(num_rows, np.bool_)
    step = max(1, _PIECE_BYTES // (4 * vocab_size))
    for start in range(0, num_rows, step):
        piece = slice(start, start + step)
        best = slice(int(top_ends[start] - num_top[start]), int(top_ends[piece][-1]))
        token_ids = requested.token_ids[piece]
        found = logits(requested.rows[piece])
        finite[piece] = _fill(columns, piece, best, found, token_ids, num_top[piece], functions)
    owner = np.repeat(requested.slots, requested.counts)
    return by_slot(requested, columns), np.unique(owner[~finite])


def _fill(
    columns: PromptColumns,
    piece: slice,
    best: slice,
    logits: Tensor,
    token_ids: IntArray,
    num_top: IntArray,
    functions: RowFunctions,
) -> BoolArray:
    """Write the logprobs of a piece of rows into the columns; return [n], whether each row's logits are finite."""
    found = row_logprobs(logits, token_ids, np.arange(len(num_top)), num_top, functions)
    columns.chosen[piece] = found.chosen
    columns.ranks[piece] = found.ranks
    is_requested = np.arange(found.top.shape[1]) < num_top[:, None]
    columns.top_ids[best] = found.top_ids[is_requested]
    columns.top[best] = found.top[is_requested]
    # The maximum is NaN if any logit is; a single -inf is a token that the model masks.
    finite: BoolArray = logits.amax(dim=1).isfinite().cpu().numpy()
    return finite
