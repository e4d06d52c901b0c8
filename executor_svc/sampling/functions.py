"""The functions of sampling that libraries round by the processor: a device has its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from executor_svc.plan.arrays import BoolArray, FloatArray, IntArray
from executor_svc.sampling.noise import uniform


@dataclass(frozen=True, slots=True)
class WholeDraws:
    """Draws from all tokens of n rows of logits, [n] each; a row may occur several times."""

    rows: IntArray
    peak: FloatArray
    """The largest logit."""
    temperature: FloatArray
    floor: FloatArray | None
    """The smallest scaled logit that is kept; None: all are kept."""
    keys: IntArray
    """Of the noise."""

    def take(self, rows: IntArray) -> WholeDraws:
        """Return some of the draws, ascending."""
        if len(rows) == len(self.rows):
            return self
        floor = None if self.floor is None else self.floor[rows]
        return WholeDraws(self.rows[rows], self.peak[rows], self.temperature[rows], floor, self.keys[rows])


@dataclass(frozen=True, slots=True)
class PrefixDraws:
    """Draws of n rows from what top_k and top_p leave of their most likely tokens."""

    whole: WholeDraws
    top_k: IntArray
    """[n]; the vocabulary size means off."""
    top_p: FloatArray
    """[n] float64; 1 means off."""
    ids: IntArray
    """[n, size] the most likely tokens, best first, ties to the lowest id."""


@dataclass(frozen=True, slots=True)
class Standings:
    """Where tokens stand in n rows of logits."""

    peak: FloatArray
    """[n] float32, the largest logit."""
    total: NDArray[np.float64]
    """[n] the sum of exp(logit - peak), as `row_math.fold_sum` adds it."""
    ahead: IntArray
    """[n] number of tokens with a larger logit, or with the same and a lower id."""


class RowFunctions(Protocol):
    """Functions of each number alone: a value's bits depend on its arguments only, not on its place or on the batch."""

    def exp(self, x: Tensor, shift: Tensor) -> Tensor:
        """Return exp(x - shift), [n, w] float32, new memory; x: [n, w] float32, contiguous; shift: [n, 1] float32.

        Values below exp(-87) may be 0.
        """
        ...

    def log(self, x: Tensor) -> Tensor:
        """Return the natural logarithms of positive finite numbers, [n, 1] float64; NaN for NaN."""
        ...

    def gumbel(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        """Return standard Gumbel noise [n, w] float32 of `noise.uniform` of keys [n, 1] and ids [w] or [n, w]; int64.

        With v uniform in (0, 1), -log1p(-v) has an exponential distribution and is exact for the small values that win
        a race; minus its log has a Gumbel one.
        """
        ...

    def draw(self, logits: Tensor, draws: WholeDraws) -> IntArray | None:
        """Return a token [n] for each draw from rows of logits [L, vocab] float32, contiguous.

        It is the first of the largest of (logit - peak) / temperature + `gumbel` of the draw's key, without those whose
        first part is below the floor. None: this device has no such function.
        """
        ...

    def draw_prefix(self, logits: Tensor, draws: PrefixDraws) -> tuple[IntArray, BoolArray] | None:
        """Return a token [n] for each draw, and whether its candidates were enough [n]: otherwise it is undefined.

        logits: as in `draw`. None: this device has no such function, or not for so many candidates.
        """
        ...

    def standings(self, logits: Tensor, rows: IntArray, tokens: IntArray) -> Standings | None:
        """Return where a token [n] of each of rows [n] of the logits stands; logits: as in `draw`.

        None: this device has no such function.
        """
        ...


class TorchFunctions:
    """PyTorch's functions, for GPUs: on the CPU their bits depend on the processor."""

    def exp(self, x: Tensor, shift: Tensor) -> Tensor:
        return (x - shift).exp_()

    def log(self, x: Tensor) -> Tensor:
        return x.log()

    def gumbel(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        v: Tensor = uniform(keys, token_ids)
        return torch.neg(v, out=v).log1p_().neg_().log_().neg_()

    def draw(self, logits: Tensor, draws: WholeDraws) -> IntArray | None:
        return None

    def draw_prefix(self, logits: Tensor, draws: PrefixDraws) -> tuple[IntArray, BoolArray] | None:
        return None

    def standings(self, logits: Tensor, rows: IntArray, tokens: IntArray) -> Standings | None:
        return None


_BLOCK = 1 << 14
"""Numbers that PyTorch works out in one thread."""
_VECTOR = 64
"""Numbers that fill whole vectors, of any processor."""


class BlockedFunctions(TorchFunctions):
    """PyTorch's functions, of whole vectors in one thread alone: a value's bits do not depend on its place.

    PyTorch works out the end of an array, and that of each thread's share, by other code than the rest. They may depend
    on the processor, as `TorchFunctions` do.
    """

    def exp(self, x: Tensor, shift: Tensor) -> Tensor:
        return _blocked(torch.exp, x - shift)

    def log(self, x: Tensor) -> Tensor:
        return _blocked(torch.log, x)

    def gumbel(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        v = uniform(keys, token_ids)
        return _blocked(lambda block: torch.log(-torch.log1p(-block)), v).neg_()


def _blocked(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return a function of each number of x; of padding it is worked out, too."""
    flat = functional.pad(x.reshape(-1), (0, -x.numel() % _VECTOR), value=0.5)
    blocks = [function(block) for block in flat.split(_BLOCK)]
    return torch.cat(blocks)[: x.numel()].view(x.shape) if blocks else x
