"""A linear layer on the CPU, with its weight in panels, and the same panels as a table of embeddings.

A probe checks on this machine that a row's bits do not depend on its batch: the kernels' sources guarantee this, the
probe tests their machine code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.panel_layout import PANEL
from executor_svc.cpu.kernels.panels import new_panels
from executor_svc.cpu.kernels.quantized.launches import DensePart
from executor_svc.device.kernels import Linear, WeightRows

BLOCK_BYTES = 1 << 19
"""Of a weight's rows that are read at a time: they stay in the L2 cache until they are in panels."""
_ROW_COUNTS = (1, 2, 3, 7, 12, 16, 25)
_MAX_ROWS = 97
_MOST_SMALL = 12
"""Every number of rows up to this one is tried, if a sequence with drafts may bring as many."""


class CpuLinear:
    """x @ weight.T + bias, rounded to the model's dtype."""

    def __init__(self, weight: Tensor | WeightRows, bias: Tensor | None, kernels: CpuKernels) -> None:
        """weight: [out_features, in_features]; bias: [out_features] or None; both in the model's dtype.

        A weight that is not a tensor is read by `read`, in the kernels' `matrix_dtype` if they have one.
        """
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.contiguous()
        self.dtype, self._kernels = weight.dtype, kernels
        held = None if isinstance(weight, Tensor) else kernels.matrix_dtype
        self.panels = new_panels(self.out_features, self.in_features, held or weight.dtype)
        if isinstance(weight, Tensor):
            kernels.panel_writer.write(self.panels, 0, weight)

    @property
    def parts(self) -> list[DensePart]:
        """As a `CpuStoredLinear` has them."""
        return [DensePart(self.panels, self.out_features)]

    def read(self, weight: WeightRows) -> None:
        """Put the rows of the weight into the panels; any thread may do so."""
        first = 0
        for block in weight.blocks(BLOCK_BYTES, PANEL):
            self._kernels.panel_writer.write(self.panels, first, block.to(self.panels.dtype))
            first += len(block)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Map [rows, in_features], contiguous, to [rows, out_features]; out_dtype: that of x, or float32."""
        return self._kernels.linear(x, self.panels, self.bias, self.out_features, out_dtype or x.dtype)


class PanelEmbedding:
    """Implements `device.kernels.Embedding`: the rows of a linear's weight, from its panels."""

    def __init__(self, linear: CpuLinear, kernels: CpuKernels) -> None:
        self._linear = linear
        self._kernels = kernels

    def __call__(self, token_ids: Tensor, scale: float) -> Tensor:
        linear = self._linear
        return self._kernels.embed_from_panels(linear.panels, linear.in_features, token_ids, scale, linear.dtype)


class CpuTableEmbedding:
    """Implements `device.kernels.Embedding`: the rows of a dense table."""

    def __init__(self, table: Tensor, dtype: torch.dtype, kernels: CpuKernels) -> None:
        """dtype: of the model."""
        self._table, self._dtype, self._kernels = table, dtype, kernels

    def __call__(self, token_ids: Tensor, scale: float) -> Tensor:
        return self._kernels.take_rows(self._table, token_ids, "embedded", scale, self._dtype)


def rows_with_drafts(max_drafts: int) -> tuple[int, ...]:
    """Return the numbers of rows that one sequence brings to a step with drafts, the small ones and the greatest."""
    return (*range(1, min(1 + max_drafts, _MOST_SMALL) + 1), 1 + max_drafts) if max_drafts else ()


def probe_linear(linear: Linear, dtype: torch.dtype, max_rows: int, more: tuple[int, ...] = ()) -> str | None:
    """Compare rows in small batches, at different places, with the same rows in a large batch.

    more: numbers of rows to try beside those that are always tried. Returns an error message, or None if all rows are
    equal. Results that are NaN in both are: weights so large that they overflow say nothing of this machine.
    """
    generator = torch.Generator().manual_seed(0)
    most = min(max_rows, _MAX_ROWS)
    x = torch.randn(most, linear.in_features, generator=generator).to(dtype)
    expected = linear(x)
    for count in sorted(count for count in {*_ROW_COUNTS, *more} if count < most):
        for start in (0, most - count):
            if not _is_same(linear(x[start : start + count]), expected[start : start + count]):
                return f"a row has other bits among {count} rows than among {most}"
    return None


def _is_same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())
