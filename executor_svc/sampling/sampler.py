"""Choosing tokens: a pure function of each logits row, its parameters, seed, sample index, position and token history.

A row's token and logprobs have the same bits in every batch and, on the CPU, on every processor. Only these operations
are applied to whole rows: elementwise operations that IEEE 754 rounds, and the device's `RowFunctions`; maxima and
integer counts (exact in any order); sums folded in an order that depends only on the width (torch's own `sum` has other
bits for one row than for several); and running sums, which add one by one.

The edits of `logits_processors` come first, then filters in vLLM's order: temperature, floors (`floors`), top_k,
top_p; ties go to the lowest id everywhere. The draw is the Gumbel-max trick with noise keyed per token id, so a filter
can reduce the candidates first and noise is computed only for the rest. Only rows whose logits change are copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cadenza_common.plan.result import SlotError
from executor_svc.batch.step_result import SampledTokens
from executor_svc.plan.arrays import BoolArray, FloatArray, IntArray
from executor_svc.sampling.columns import SamplingColumns
from executor_svc.sampling.floors import row_floors
from executor_svc.sampling.functions import PrefixDraws, RowFunctions, WholeDraws
from executor_svc.sampling.logits_processors import process
from executor_svc.sampling.logprobs import row_logprobs
from executor_svc.sampling.noise import DrawPurpose, row_keys
from executor_svc.sampling.row_math import are_all, argmax, chunks, fold_sum, source_rows, top_ids

# Numbers of candidates to try, in order; a row's number depends on its own parameters and logits only.
_PREFIXES = (128, 2048)
_NON_FINITE = np.int64(SlotError.NON_FINITE_LOGITS)
# Elements of a full-vocabulary draw held at once, for each thread: small enough for the L2 cache.
_TILE_ELEMENTS = 32768


def sample_greedy(best: IntArray) -> SampledTokens:
    """Choose the most likely token of each of R rows without edits; best: [R], as from `row_math.argmax`."""
    return SampledTokens(best, (best < 0) * _NON_FINITE, None)


def sample(
    logits: Tensor, columns: SamplingColumns, functions: RowFunctions, best: IntArray | None = None
) -> SampledTokens:
    """Choose a token for each of R rows, which read logits [L, vocab] float32, contiguous; these are not changed.

    functions: the device's. best: [L], as `row_math.argmax` returns it for the logits, if already known.

    Several rows may read the same logits: each gets the token that it gets alone. A row whose logits contain NaN, +inf
    or only -inf fails with NON_FINITE_LOGITS, a row whose edits mask every token with NO_ALLOWED_TOKEN; other rows are
    not affected.
    """
    tokens, sources = argmax(logits) if best is None else best.copy(), columns.sources
    if sources is not None:
        tokens = tokens[sources]
    # The raw logits decide first whether a row fails, so edits hide no NaN.
    errors = sample_greedy(tokens).errors
    drawn = columns["temperature"] > 0
    edits = columns.edits
    if edits is not None:
        _choose_edited(process(logits, edits, sources), edits.rows, columns, tokens, errors, functions)
        drawn[edits.rows] = False
    (plain,) = (drawn & (errors == 0)).nonzero()
    if len(plain):
        their = columns if len(plain) == len(tokens) else columns.take(plain)
        tokens[plain] = _draw(logits, source_rows(plain, sources), tokens[plain], their, functions)
    (requested,) = ((columns["num_logprobs"] >= 0) & (errors == 0)).nonzero()
    logprobs = None
    if len(requested):
        num_top = columns["num_logprobs"][requested]
        logprobs = row_logprobs(logits, tokens, requested, num_top, functions, sources)
    return SampledTokens(tokens, errors, logprobs)


def _choose_edited(
    x: Tensor, rows: IntArray, columns: SamplingColumns, tokens: IntArray, errors: IntArray, functions: RowFunctions
) -> None:
    """Choose tokens for the rows [P] of the batch with edited logits x [P, vocab]; write tokens and errors [R]."""
    best = argmax(x)
    nothing_left = (best < 0) & (errors[rows] == 0)
    errors[rows[nothing_left]] = int(SlotError.NO_ALLOWED_TOKEN)
    tokens[rows] = best
    (drawn,) = ((columns["temperature"][rows] > 0) & (errors[rows] == 0)).nonzero()
    if len(drawn):
        tokens[rows[drawn]] = _draw(x, drawn, best[drawn], columns.take(rows[drawn]), functions)


def _draw(
    logits: Tensor, rows: IntArray, best: IntArray, columns: SamplingColumns, functions: RowFunctions
) -> IntArray:
    """Draw a token for each of n rows [n] of logits [L, vocab]; all have a temperature above 0.

    best: [n] ids of their largest logits; columns: those of these n rows.
    """
    top_k, vocab = columns["top_k"], logits.shape[1]
    limited = (top_k > 0) & (top_k < vocab)
    searched = limited | (columns["top_p"] < 1)
    if not searched.any():
        return _draw_from_all(logits, rows, best, columns, functions)
    tokens = np.empty(len(best), np.int64)
    if not searched.all():
        (full,) = (~searched).nonzero()
        tokens[full] = _draw_from_all(logits, rows[full], best[full], columns.take(full), functions)
    drawn = _DrawsFromPrefix(logits, rows, best, columns, functions)
    (pending,) = searched.nonzero()
    for size in (*_PREFIXES, vocab):
        is_ready = (top_k[pending] <= size) | ~limited[pending] | (size >= vocab)
        ready, undecided = pending[is_ready], [pending[~is_ready]]
        for chunk in chunks(ready, vocab):
            chosen, decided = drawn.draw(chunk, min(size, vocab))
            tokens[chunk[decided]] = chosen[decided]
            undecided.append(chunk[~decided])
        pending = np.concatenate(undecided)
        if not len(pending):
            break
        pending.sort()
    return tokens


def _draw_from_all(
    logits: Tensor, rows: IntArray, best: IntArray, columns: SamplingColumns, functions: RowFunctions
) -> IntArray:
    """As `_draw`, for rows without top_k and top_p."""
    if logits.device.type == "cpu":
        tokens = functions.draw(logits, _whole_draws(logits, rows, best, columns))
        if tokens is not None:
            return tokens
    result: IntArray = _race_all(_LogitsRows.of(logits, rows, best, columns, functions)).cpu().numpy()
    return result


def _whole_draws(logits: Tensor, rows: IntArray, best: IntArray, columns: SamplingColumns) -> WholeDraws:
    """Return the draws of `_draw` from all tokens; logits on the CPU."""
    peak = logits.numpy()[rows, best]
    floor = row_floors(logits, rows, torch.from_numpy(peak[:, None]), columns.numbers)
    kept = None if floor is None else floor.numpy()[:, 0]
    return WholeDraws(rows, peak, columns["temperature"], kept, _keys(columns))


class _DrawsFromPrefix:
    """Draws of n rows from their most likely tokens; arguments as of `_draw`."""

    def __init__(
        self, logits: Tensor, rows: IntArray, best: IntArray, columns: SamplingColumns, functions: RowFunctions
    ) -> None:
        self._given = logits, rows, best, columns, functions
        self._whole = _whole_draws(logits, rows, best, columns) if logits.device.type == "cpu" else None
        self._in_rows: _LogitsRows | None = None

    def draw(self, chunk: IntArray, size: int) -> tuple[IntArray, BoolArray]:
        """Draw for some of the rows; returns tokens, and whether `size` tokens were enough, as `_race_prefix`."""
        logits, rows, _, columns, functions = self._given
        if self._whole is not None:
            whole, limits = self._whole.take(chunk), columns["top_k"][chunk]
            limits = np.where(limits > 0, limits, logits.shape[1])
            ids = top_ids(logits, size, rows[chunk]).numpy()
            found = functions.draw_prefix(logits, PrefixDraws(whole, limits, columns["top_p"][chunk], ids))
            if found is not None:
                return found
        if self._in_rows is None:
            self._in_rows = _LogitsRows.of(*self._given)
        return _race_prefix(self._in_rows.take(chunk), size)


def _keys(columns: SamplingColumns) -> IntArray:
    return row_keys(columns["seed"], columns["sample_index"], columns.position, DrawPurpose.SAMPLE)


@dataclass(frozen=True, slots=True)
class _LogitsRows:
    """n rows of logits, and the parameters to filter and draw from them, as [n, 1] tensors."""

    source: Tensor
    """[L, vocab] logits that contain these rows; `logits` copies only the part that it returns."""
    index: Tensor | None
    """[n] indices into the rows of source; None: all rows."""
    peak: Tensor
    """Largest logit."""
    temperature: Tensor
    floor: Tensor | None
    """Smallest scaled logit that is kept, at most 0; None: all are kept."""
    top_k: Tensor
    """The vocabulary size means off."""
    top_p: Tensor
    """float64; 1 means off."""
    key: Tensor
    """int64 keys of the noise."""
    functions: RowFunctions

    @classmethod
    def of(
        cls, logits: Tensor, rows: IntArray, best: IntArray, columns: SamplingColumns, functions: RowFunctions
    ) -> _LogitsRows:
        device, vocab = logits.device, logits.shape[1]

        def column(values: IntArray | FloatArray) -> Tensor:
            return torch.from_numpy(values[:, None]).to(device)

        key = _keys(columns)
        index = column(rows)[:, 0]
        peak = logits[index, column(best)[:, 0]][:, None]
        return cls(
            logits,
            None if are_all(rows, logits.shape[0]) else index,
            peak,
            column(columns["temperature"]),
            row_floors(logits, rows, peak, columns.numbers),
            column(np.where(columns["top_k"] > 0, columns["top_k"], vocab)),
            column(columns["top_p"]).to(torch.float64),
            column(key),
            functions,
        )

    def take(self, rows: IntArray) -> _LogitsRows:
        """Return a subset of the n rows; rows: ascending."""
        if len(rows) == len(self.peak):
            return self
        index = torch.from_numpy(rows).to(self.peak.device)
        return _LogitsRows(
            self.source,
            index if self.index is None else self.index.index_select(0, index),
            self.peak.index_select(0, index),
            self.temperature.index_select(0, index),
            None if self.floor is None else self.floor.index_select(0, index),
            self.top_k.index_select(0, index),
            self.top_p.index_select(0, index),
            self.key.index_select(0, index),
            self.functions,
        )

    def logits(self, start: int = 0, end: int | None = None) -> Tensor:
        """Return the logits of token ids start to end - 1, [n, end - start]."""
        part = self.source[:, start:end]
        return part if self.index is None else part.index_select(0, self.index)

    def scaled(self, logits: Tensor) -> Tensor:
        """Return log(p / p of the most likely token) of these rows' logits [n, any]; -inf below the floor."""
        y = (logits - self.peak).div_(self.temperature)
        return y if self.floor is None else y.masked_fill_(y < self.floor, float("-inf"))

    def exp(self, scaled: Tensor) -> Tensor:
        """Return p / p of the most likely token for numbers of `scaled`."""
        return self.functions.exp(scaled, torch.zeros_like(self.peak))


def _race_all(rows: _LogitsRows) -> Tensor:
    """Draw a token [n] int64 from the whole vocabulary, in tiles of token ids that stay in cache."""
    n, vocab = len(rows.peak), rows.source.shape[1]
    device = rows.source.device
    width = max(64, _TILE_ELEMENTS * torch.get_num_threads() // n) if device.type == "cpu" else vocab
    best = torch.full((n,), float("-inf"), device=device)
    tokens = torch.zeros(n, dtype=torch.int64, device=device)
    for start in range(0, vocab, width):
        ids = torch.arange(start, min(start + width, vocab), device=device)
        score = rows.scaled(rows.logits(start, start + width)).add_(rows.functions.gumbel(rows.key, ids))
        top, index = score.max(dim=1)
        # Strictly better, so that ties stay with the lower id.
        better = top > best
        tokens = torch.where(better, index + start, tokens)
        best = torch.where(better, top, best)
    return tokens


def _race_prefix(rows: _LogitsRows, size: int) -> tuple[IntArray, BoolArray]:
    """Draw from the candidates that top_k and top_p leave among each row's `size` most likely tokens.

    Returns tokens [n], and whether `size` was enough [n]; otherwise the token is undefined.
    """
    logits = rows.logits()
    vocab = logits.shape[1]
    ids = top_ids(logits, size)
    y = rows.scaled(logits.gather(1, ids))
    mass = rows.exp(y).to(torch.float64)
    mass.masked_fill_(torch.arange(size, device=ids.device) >= rows.top_k, 0.0)
    running = mass.cumsum(dim=1)
    limited = rows.top_k < vocab
    # Sums over the vocabulary only if some row has top_p without top_k.
    total = running[:, -1:] if bool(limited.all()) else torch.where(limited, running[:, -1:], _total_mass(rows, logits))
    # top_p keeps every token with less than top_p of the mass before it.
    target = torch.where(rows.top_p < 1, rows.top_p * total, float("inf"))
    kept = (running - mass < target) & (mass > 0)
    kept[:, 0] = True
    decided = limited | (running[:, -1:] >= target) | (mass[:, -1:] == 0)
    score = y.masked_fill_(~kept, float("-inf")).add_(rows.functions.gumbel(rows.key, ids))
    highest = score.amax(dim=1, keepdim=True)
    tokens = torch.where(score == highest, ids, vocab).amin(dim=1)
    enough: BoolArray = decided[:, 0].cpu().numpy()
    return tokens.cpu().numpy(), enough | (size >= vocab)


def _total_mass(rows: _LogitsRows, logits: Tensor) -> Tensor:
    """Return the sum [n, 1] float64 of p / p of the most likely token, in an order that depends only on the width."""
    return fold_sum(rows.exp(rows.scaled(logits)))
