"""The functions of sampling that libraries round by the processor: a device has its own."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from executor_svc.plan.arrays import FloatArray, IntArray
from executor_svc.sampling.noise import uniform


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

    def draw(
        self,
        logits: Tensor,
        rows: IntArray,
        peak: FloatArray,
        temperature: FloatArray,
        floor: FloatArray | None,
        keys: IntArray,
    ) -> IntArray | None:
        """Return a token [n] for each of the rows [n] of logits [L, vocab] float32, contiguous, from all of them.

        It is the first of the largest of (logit - peak) / temperature + `gumbel` of the row's key, without those whose
        first part is below the floor: [n] each, float32, keys int64. None: this device has no such function.
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

    def draw(
        self,
        logits: Tensor,
        rows: IntArray,
        peak: FloatArray,
        temperature: FloatArray,
        floor: FloatArray | None,
        keys: IntArray,
    ) -> IntArray | None:
        return None
