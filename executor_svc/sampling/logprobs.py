"""Logprobs, ranks and best tokens of rows of logits, for sampled tokens and for prompt tokens.

Those of a prompt are computed with each chunk of it, in pieces that bound the memory for logits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cadenza_common.plan.result import LogprobColumns
from executor_svc.batch.prompt_rows import PromptColumns, PromptRows, by_slot
from executor_svc.batch.step_result import RowLogprobs
from executor_svc.plan.arrays import BoolArray, FloatArray, IntArray
from executor_svc.sampling.functions import RowFunctions
from executor_svc.sampling.row_math import chunks, log_sum_exp, source_rows, take_rows, top_ids

# Logits held at once. A chunk of 512 tokens over a vocabulary of 150k would have 300 MB of them.
_PIECE_BYTES = 64 << 20


def row_logprobs(
    logits: Tensor,
    tokens: IntArray,
    rows: IntArray,
    num_top: IntArray,
    functions: RowFunctions,
    sources: IntArray | None = None,
) -> RowLogprobs:
    """Return logprobs, ranks and best tokens of n of R rows, which read raw logits [L, vocab].

    Args:
        logits: [L, vocab] float32.
        tokens: [R] the token of each row.
        rows: [n] indices into the R rows.
        num_top: [n] number of best tokens requested for each.
        functions: the device's.
        sources: [R] the logits row that each row reads; None: its own.
    """
    vocab = logits.shape[1]
    widest = min(int(num_top.max()), vocab)
    if logits.device.type == "cpu" and (
        found := _logprobs_by_standings(logits, tokens, rows, widest, functions, sources)
    ):
        return RowLogprobs(rows, found[0], found[1], np.minimum(num_top, vocab), found[2], found[3])
    parts = [
        logprobs_of_few(
            take_rows(logits, source_rows(few, sources)),
            torch.from_numpy(tokens[few])[:, None].to(logits.device),
            widest,
            functions,
        )
        for few in chunks(rows, vocab)
    ]
    chosen, ranks, best, top = (torch.cat(columns).cpu().numpy() for columns in zip(*parts, strict=True))
    return RowLogprobs(rows, chosen, ranks, np.minimum(num_top, vocab), best, top)


def _logprobs_by_standings(
    logits: Tensor, tokens: IntArray, rows: IntArray, num_top: int, functions: RowFunctions, sources: IntArray | None
) -> tuple[FloatArray, IntArray, IntArray, FloatArray] | None:
    """As `logprobs_of_few` of all rows, as arrays; None: the device has no such function."""
    places, chosen = source_rows(rows, sources), tokens[rows]
    logits = logits.contiguous()
    standings = functions.standings(logits, places, chosen)
    if standings is None:
        return None
    x = logits.numpy()
    best = top_ids(logits, num_top, places).numpy() if num_top else np.zeros((len(rows), 0), np.int64)
    log_total = functions.log(torch.from_numpy(standings.total[:, None])).numpy() + standings.peak[:, None]
    with np.errstate(all="ignore"):  # other ranks than 0 have anything in place of logits
        return (
            (x[places, chosen] - log_total[:, 0]).astype(np.float32),
            standings.ahead + 1,
            best,
            (x[places[:, None], best] - log_total).astype(np.float32),
        )


def logprobs_of_few(
    x: Tensor, chosen: Tensor, num_top: int, functions: RowFunctions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logprob and rank [n] of each row's token, ids and logprobs [n, num_top] of its best tokens.

    x: [n, vocab] float32; chosen: [n, 1] int64 on its device. Does not wait for a GPU.
    """
    device = x.device
    log_total = log_sum_exp(x, functions)
    value = x.gather(1, chosen)
    ahead = (x > value) | ((x == value) & (torch.arange(x.shape[1], device=device) < chosen))
    best = top_ids(x, num_top) if num_top else chosen[:, :0]
    return (
        (value - log_total).to(torch.float32)[:, 0],
        ahead.sum(dim=1) + 1,
        best,
        (x.gather(1, best) - log_total).to(torch.float32),
    )


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
