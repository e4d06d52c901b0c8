"""Operations over rows of logits; a row's bits do not depend on the other rows of the batch, see `sampler`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor_svc.plan.arrays import FloatArray, IntArray
from executor_svc.sampling.functions import RowFunctions

# Elements of rows that are processed at once for candidates or logprobs. Measured: above about 2 MB every temporary
# costs fresh pages, and an exp of 10 x 49152 took 8.8 ms where four rows took 0.13 ms.
_CHUNK_ELEMENTS = 1 << 17
NARROW = 4096
"""Width at which a folded sum changes to float64."""
# Numbers of a row of which the largest says whether any is among the largest of the row.
_BLOCK = 64
# The bits of -0.0.
_MINUS_ZERO = np.int32(-(2**31))


def argmax(x: Tensor) -> IntArray:
    """Return the lowest id of the maximum of each row, [R]; -1 for a row with NaN or +inf, or only -inf."""
    # A NaN counts as largest, so the maximum is finite exactly if the row can be sampled.
    if x.device.type == "cpu":
        # numpy's argmax is vectorized and needs no thread barrier: 64 x 49152 took 0.15 ms, torch's 2 to 8 ms.
        ids: IntArray = x.numpy().argmax(axis=1)
        return np.where(np.isfinite(x.numpy()[np.arange(len(ids)), ids]), ids, -1)
    best = x.argmax(dim=1, keepdim=True)
    result: IntArray = best.where(x.gather(1, best).isfinite(), -1)[:, 0].cpu().numpy()
    return result


def chunks(rows: IntArray, vocab: int) -> Iterator[IntArray]:
    """Split the rows into pieces that stay in cache."""
    step = max(1, _CHUNK_ELEMENTS // vocab)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def are_all(rows: IntArray, num_rows: int) -> bool:
    """Return whether these are all `num_rows` rows, each once and in order."""
    return len(rows) == num_rows and bool((rows == np.arange(num_rows)).all())


def take_rows(x: Tensor, rows: IntArray) -> Tensor:
    """Return these rows, in any order and with repetitions; x itself if they are all rows, each once and in order."""
    return x if are_all(rows, x.shape[0]) else x.index_select(0, torch.from_numpy(rows).to(x.device))


def source_rows(rows: IntArray, sources: IntArray | None) -> IntArray:
    """Return the logits rows that these rows read; sources None: their own."""
    return rows if sources is None else sources[rows]


def log_sum_exp(x: Tensor, functions: RowFunctions) -> Tensor:
    """Return the log of the sum of exp(x) of each row: [n, w] float32, contiguous -> [n, 1] float64."""
    peak = x.amax(dim=1, keepdim=True)
    return functions.log(fold_sum(functions.exp(x, peak))) + peak


def fold_sum(x: Tensor) -> Tensor:
    """Return the sum of each row, [n, w] float32 -> [n, 1] float64, by folding rows in halves, the last in float64.

    Folds are elementwise additions, so a row's bits do not depend on the other rows.
    """
    while x.shape[1] > 1:
        if x.shape[1] <= NARROW:
            x = x.to(torch.float64)
        width = x.shape[1]
        half = width // 2
        folded = x[:, :half] + x[:, half : 2 * half]
        if width % 2:
            folded[:, :1] += x[:, -1:]
        x = folded
    return x.to(torch.float64)


def top_ids(logits: Tensor, size: int, rows: IntArray | None = None) -> Tensor:
    """Return the ids of the largest logits, [n, size], best first, ties to the lowest id, unlike torch's top-k.

    rows: [n] those of logits on the CPU; None: all.
    """
    vocab = logits.shape[1]
    if logits.device.type == "cpu":
        x = logits.numpy()
        found = [_top_of_row(x[row], size) for row in (range(len(x)) if rows is None else rows)]
        return torch.from_numpy(found[0][None] if len(found) == 1 else np.stack(found))
    # A float's bits, sign undone, order like the float; -0.0 becomes 0.0 first. The id breaks ties from below.
    bits = (logits + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    keys = (ordered << 32) | (vocab - 1 - torch.arange(vocab, device=logits.device))
    return vocab - 1 - (keys.topk(size, dim=1).values & 0xFFFFFFFF)


def _candidates(x: FloatArray, size: int) -> IntArray:
    """Return ids, all of them in order or some in any order, among which the `size` largest numbers of a row are.

    Blocks whose largest number is below that of `size` others have none of them. A block's numbers stand apart, so that
    the largest of many blocks are found at once by vectors.
    """
    num_blocks = len(x) // _BLOCK
    whole = num_blocks * _BLOCK
    if num_blocks < 4 * size:
        return np.arange(len(x))
    with np.errstate(invalid="ignore"):  # other ranks than 0 may have signalling NaNs
        highest = x[:whole].reshape(_BLOCK, num_blocks).max(axis=0)
    rest = num_blocks - size
    (blocks,) = (~(highest < _number_at(highest, rest))).nonzero()
    if len(blocks) == num_blocks:
        return np.arange(len(x))
    ids: IntArray = (blocks[:, None] + np.arange(0, whole, num_blocks)).ravel()
    return ids if whole == len(x) else np.concatenate((ids, np.arange(whole, len(x))))


def _number_at(x: FloatArray, place: int) -> Any:
    """Return the number that sorting x would put at a place."""
    sorted_there = x.copy()
    sorted_there.partition(place)
    return sorted_there[place]


def _top_of_row(x: FloatArray, size: int) -> IntArray:
    """Return what `top_ids` does for one row [vocab]; any ids for one with NaN.

    Through numpy, whose partition and sort are vectorized, and which needs no thread barrier: keys of the largest
    numbers alone.
    """
    vocab, ids = len(x), _candidates(x, size)
    numbers = x if len(ids) == vocab else x[ids]
    rest = len(ids) - size
    if rest:
        ids = ids[~(numbers < _number_at(numbers, rest))]
    bits = x[ids].view(np.int32)
    # Not by adding 0.0: numpy warns of signalling NaNs, and other ranks than 0 have anything in place of logits.
    bits[bits == _MINUS_ZERO] = 0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64)
    keys = (ordered << 32) | (vocab - 1 - ids)
    keys.sort()
    found: IntArray = vocab - 1 - (keys[: -size - 1 : -1] & 0xFFFFFFFF)
    return found
