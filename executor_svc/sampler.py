"""Choosing tokens: a pure function of each logits row, its parameters, seed, sample index and position.

A row's token and logprobs have the same bits whatever it is sampled with. Only these are applied to whole rows:
elementwise operations (measured on torch 2.13, 1 to 7 threads, odd widths and offsets: no value of exp, log or log1p
depends on its place), maxima and integer counts (exact in any order), sums folded in an order that the width alone
fixes (torch's own `sum` has other bits for one row than for several), and running sums, which go one by one.

Filters come in vLLM's order: temperature, min_p, top_k, top_p; ties go to the lowest id everywhere.
The draw is the Gumbel-max trick with noise keyed per token id, so a filter can shrink the candidates first and the
noise is made for those alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_svc.kernels.philox import Purpose, gumbel, row_keys
from executor_svc.plan import BoolArray, FloatArray, IntArray

# Candidates looked at before falling back on more; a row's prefix depends on its own parameters and logits only.
_PREFIXES = (128, 2048)
# Elements of a full-vocabulary draw held at once, for each thread: small enough for the L2 cache.
_TILE_ELEMENTS = 32768
# Elements of rows from which candidates or logprobs are taken at once. Measured: above about 2 MB every temporary costs
# fresh pages, and an exp of 10 x 49152 took 8.8 ms where four rows took 0.13 ms.
_CHUNK_ELEMENTS = 1 << 17
# Width from which a folded sum goes on in float64.
_NARROW = 4096


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Parameters of R rows, in columns."""

    temperature: FloatArray
    """[R], 0: greedy."""
    top_p: FloatArray
    """[R], 1: off."""
    top_k: IntArray
    """[R], 0: off."""
    log_min_p: FloatArray
    """[R], log of min_p; -inf: off."""
    seed: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """[R]."""
    sample_index: IntArray
    """[R]."""
    position: IntArray
    """[R], of the token to be chosen."""
    num_logprobs: IntArray
    """[R], -1: none, 0: the chosen token alone."""
    masked_rows: IntArray
    """[m] rows with a token that may not be chosen (stop tokens before min_tokens)."""
    masked_ids: IntArray
    """[m] those tokens."""

    def take(self, rows: IntArray) -> SamplingColumns:
        """The columns of these rows, for filters and draws: without masks."""
        none = rows[:0]
        return SamplingColumns(
            self.temperature[rows], self.top_p[rows], self.top_k[rows], self.log_min_p[rows], self.seed[rows],
            self.sample_index[rows], self.position[rows], self.num_logprobs[rows], none, none,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Logprobs of the chosen tokens of the rows that asked for them, before temperature and filters."""

    rows: IntArray
    """[n]."""
    chosen: FloatArray
    """[n]."""
    ranks: IntArray
    """[n], from 1."""
    num_top: IntArray
    """[n]."""
    top_ids: IntArray
    """[n, max(num_top)], best first; row i's first num_top[i] count."""
    top: FloatArray
    """The same shape."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What was chosen for R rows."""

    token_ids: IntArray
    """[R]."""
    finite: BoolArray
    """[R]; where False the logits hold NaN, +inf or nothing but -inf, and the token means nothing."""
    logprobs: RowLogprobs | None


def sample(logits: Tensor, columns: SamplingColumns) -> SampledTokens:
    """Choose a token for each row of logits [R, vocab] float32, contiguous; the logits are not changed."""
    processed = _mask(logits, columns)
    greedy = _argmax(processed)
    # argmax takes a NaN for the largest, so the value it found is finite exactly if the row can be sampled. Masks
    # hide no NaN: a masked row is judged by its raw logits.
    best = greedy if processed is logits else _argmax(logits)
    peaks = logits.gather(1, torch.from_numpy(best).to(logits.device)[:, None])[:, 0]
    finite: BoolArray = peaks.isfinite().cpu().numpy()
    drawn = np.flatnonzero((columns.temperature > 0) & finite)
    tokens = greedy
    if len(drawn):
        tokens = greedy.copy()
        tokens[drawn] = _draw(_take_rows(processed, drawn), greedy[drawn], columns.take(drawn))
    asked = np.flatnonzero((columns.num_logprobs >= 0) & finite)
    logprobs = _logprobs(logits, tokens, asked, columns.num_logprobs[asked]) if len(asked) else None
    return SampledTokens(tokens, finite, logprobs)


def _mask(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """The logits with -inf at masked tokens; the same tensor if there are none."""
    if not len(columns.masked_rows):
        return logits
    device = logits.device
    rows, ids = torch.from_numpy(columns.masked_rows).to(device), torch.from_numpy(columns.masked_ids).to(device)
    return logits.index_put((rows, ids), torch.tensor(float("-inf"), device=device))


def _argmax(x: Tensor) -> IntArray:
    """[R] the lowest id among the largest of each row; a NaN counts as largest."""
    # numpy's argmax is vectorized and needs no thread barrier: 64 x 49152 took 0.15 ms, torch's 2 to 8 ms.
    result: IntArray = x.numpy().argmax(axis=1) if x.device.type == "cpu" else x.argmax(dim=1).cpu().numpy()
    return result


def _chunks(rows: IntArray, vocab: int) -> Iterator[IntArray]:
    """The rows in pieces that stay in cache."""
    step = max(1, _CHUNK_ELEMENTS // vocab)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _take_rows(x: Tensor, rows: IntArray) -> Tensor:
    """These rows, ascending; x itself if they are all."""
    return x if len(rows) == x.shape[0] else x.index_select(0, torch.from_numpy(rows).to(x.device))


def _draw(logits: Tensor, best: IntArray, columns: SamplingColumns) -> IntArray:
    """A token for each row [n, vocab], all with a temperature above 0; best: [n] ids of the largest logits."""
    rows = _Rows.of(logits, best, columns)
    top_k, vocab = columns.top_k, logits.shape[1]
    limited = (top_k > 0) & (top_k < vocab)
    nucleus = columns.top_p < 1
    tokens = np.empty(len(best), np.int64)
    full = np.flatnonzero(~(limited | nucleus))
    if len(full):
        tokens[full] = _race_all(rows.take(full)).cpu().numpy()
    pending = np.flatnonzero(limited | nucleus)
    for size in (*_PREFIXES, vocab):
        ready = pending[(top_k[pending] <= size) | ~limited[pending] | (size >= vocab)]
        undecided: list[IntArray] = [pending[~np.isin(pending, ready)]]
        for chunk in _chunks(ready, vocab):
            chosen, decided = _race_prefix(rows.take(chunk), min(size, vocab))
            tokens[chunk[decided]] = chosen[decided]
            undecided.append(chunk[~decided])
        pending = np.sort(np.concatenate(undecided))
        if not len(pending):
            break
    return tokens


@dataclass(frozen=True, slots=True)
class _Rows:
    """Logits rows [n, vocab] and what is needed to filter and draw from them, as [n, 1] tensors beside them."""

    logits: Tensor
    peak: Tensor
    """Largest logit."""
    temperature: Tensor
    log_min_p: Tensor
    top_k: Tensor
    """vocab: off."""
    top_p: Tensor
    """float64; 1: off."""
    key: Tensor
    """int64 keys of the noise."""
    any_min_p: bool

    @classmethod
    def of(cls, logits: Tensor, best: IntArray, columns: SamplingColumns) -> _Rows:
        device, vocab = logits.device, logits.shape[1]

        def column(values: IntArray | FloatArray) -> Tensor:
            return torch.from_numpy(values[:, None]).to(device)

        key = row_keys(columns.seed, columns.sample_index, columns.position, Purpose.SAMPLE)
        return cls(
            logits,
            logits.gather(1, column(best)),
            column(columns.temperature),
            column(columns.log_min_p),
            column(np.where(columns.top_k > 0, columns.top_k, vocab)),
            column(columns.top_p).to(torch.float64),
            column(key),
            bool((columns.log_min_p > -np.inf).any()),
        )

    def take(self, rows: IntArray) -> _Rows:
        """These of the rows."""
        if len(rows) == self.logits.shape[0]:
            return self
        index = torch.from_numpy(rows).to(self.logits.device)
        return _Rows(
            self.logits.index_select(0, index),
            self.peak.index_select(0, index),
            self.temperature.index_select(0, index),
            self.log_min_p.index_select(0, index),
            self.top_k.index_select(0, index),
            self.top_p.index_select(0, index),
            self.key.index_select(0, index),
            self.any_min_p,
        )

    def scaled(self, logits: Tensor) -> Tensor:
        """log(p / p of the most likely token) of these rows' logits [n, any] under temperature, -inf by min_p."""
        y = (logits - self.peak).div_(self.temperature)
        return y.masked_fill_(y < self.log_min_p, float("-inf")) if self.any_min_p else y


def _race_all(rows: _Rows) -> Tensor:
    """[n] int64: a draw from the whole vocabulary, in tiles of token ids that stay in cache."""
    n, vocab = rows.logits.shape
    device = rows.logits.device
    width = max(64, _TILE_ELEMENTS * torch.get_num_threads() // n) if device.type == "cpu" else vocab
    best = torch.full((n,), float("-inf"), device=device)
    tokens = torch.zeros(n, dtype=torch.int64, device=device)
    for start in range(0, vocab, width):
        ids = torch.arange(start, min(start + width, vocab), device=device)
        score = rows.scaled(rows.logits[:, start : start + width]).add_(gumbel(rows.key, ids))
        top, index = score.max(dim=1)
        # Strictly better, so that ties stay with the lower id.
        better = top > best
        tokens = torch.where(better, index + start, tokens)
        best = torch.where(better, top, best)
    return tokens


def _race_prefix(rows: _Rows, size: int) -> tuple[IntArray, BoolArray]:
    """A draw from the candidates that top_k and top_p leave, looked for among each row's `size` most likely tokens.

    Returns tokens [n] and whether `size` was enough [n]; where it was not the token means nothing.
    """
    vocab = rows.logits.shape[1]
    ids = _top_ids(rows.logits, size)
    y = rows.scaled(rows.logits.gather(1, ids))
    mass = y.to(torch.float64).exp_()
    mass.masked_fill_(torch.arange(size, device=ids.device) >= rows.top_k, 0.0)
    running = mass.cumsum(dim=1)
    limited = rows.top_k < vocab
    # A fold over the vocabulary, if any row's nucleus is one of the whole distribution.
    total = running[:, -1:] if bool(limited.all()) else torch.where(limited, running[:, -1:], _total_mass(rows))
    # Kept: what is needed to reach top_p, so every token before which less than that has been gathered.
    wanted = torch.where(rows.top_p < 1, rows.top_p * total, float("inf"))
    kept = (running - mass < wanted) & (mass > 0)
    kept[:, 0] = True
    decided = limited | (running[:, -1:] >= wanted) | (mass[:, -1:] == 0)
    score = y.masked_fill_(~kept, float("-inf")).add_(gumbel(rows.key, ids))
    highest = score.amax(dim=1, keepdim=True)
    tokens = torch.where(score == highest, ids, vocab).amin(dim=1)
    enough: BoolArray = decided[:, 0].cpu().numpy()
    return tokens.cpu().numpy(), enough | (size >= vocab)


def _total_mass(rows: _Rows) -> Tensor:
    """[n, 1] float64: the sum over the vocabulary of p / p of the most likely token, in an order fixed by the width."""
    return fold_sum(rows.scaled(rows.logits).exp_())


def fold_sum(x: Tensor) -> Tensor:
    """[n, w] float32 -> [n, 1] float64: sums by folding rows in halves, in float64 once they are narrow.

    These are elementwise additions, so a row's bits are its own.
    """
    while x.shape[1] > 1:
        if x.shape[1] <= _NARROW:
            x = x.to(torch.float64)
        width = x.shape[1]
        half = width // 2
        folded = x[:, :half] + x[:, half : 2 * half]
        if width % 2:
            folded[:, :1] += x[:, -1:]
        x = folded
    return x.to(torch.float64)


def _top_ids(logits: Tensor, size: int) -> Tensor:
    """[n, size] ids of the largest logits, best first, ties to the lowest id, whatever top-k does with ties."""
    vocab = logits.shape[1]
    # A float's bits, sign undone, order like the float; -0.0 becomes 0.0 first. The id breaks ties from below.
    bits = (logits + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    keys = (ordered << 32) | (vocab - 1 - torch.arange(vocab, device=logits.device))
    return vocab - 1 - (_largest(keys, size) & 0xFFFFFFFF)


def _largest(keys: Tensor, size: int) -> Tensor:
    """[n, size] the largest of each row of int64 keys, largest first; all keys of a row differ."""
    if keys.device.type != "cpu":
        return keys.topk(size, dim=1).values
    # numpy's partition and sort are vectorized: 64 x 4096 took 0.15 and 0.6 ms, torch's topk and sort 5.5 and 32 ms.
    values, rest = keys.numpy(), keys.shape[1] - size
    if rest:
        values = np.partition(values, rest, axis=1)[:, rest:]
    return torch.from_numpy(np.sort(values, axis=1)[:, ::-1].copy())


def _logprobs(logits: Tensor, tokens: IntArray, rows: IntArray, num_top: IntArray) -> RowLogprobs:
    """Logprobs, ranks and best tokens of these rows of raw logits [R, vocab]; tokens: [R]."""
    vocab = logits.shape[1]
    widest = min(int(num_top.max()), vocab)
    parts = [_logprobs_of_few(_take_rows(logits, few), tokens[few], widest) for few in _chunks(rows, vocab)]
    chosen, ranks, top_ids, top = (torch.cat(columns).cpu().numpy() for columns in zip(*parts, strict=True))
    return RowLogprobs(rows, chosen, ranks, np.minimum(num_top, vocab), top_ids, top)


def _logprobs_of_few(x: Tensor, tokens: IntArray, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprob and rank [n] of each row's token, ids and logprobs [n, num_top] of its best."""
    device = x.device
    chosen = torch.from_numpy(tokens)[:, None].to(device)
    peak = x.amax(dim=1, keepdim=True)
    log_total = fold_sum((x - peak).exp_()).log_() + peak
    value = x.gather(1, chosen)
    ahead = (x > value) | ((x == value) & (torch.arange(x.shape[1], device=device) < chosen))
    top_ids = _top_ids(x, num_top) if num_top else chosen[:, :0]
    return (
        (value - log_total).to(torch.float32)[:, 0],
        ahead.sum(dim=1) + 1,
        top_ids,
        (x.gather(1, top_ids) - log_total).to(torch.float32),
    )
