"""Linear layers of `--numerics exact` on a GPU: never by cuBLAS, whose kernels follow the number of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.gpu.kernels.exact.few_bits import exact_few_bits, few_bits_parts, few_bits_tiles
from executor_svc.gpu.kernels.exact.product import exact_product
from executor_svc.gpu.kernels.exact.tiles import REFERENCE_ROWS, product_tiles, sums_size
from executor_svc.gpu.kernels.few_bits.layout import FewBitsWeight
from executor_svc.gpu.kernels.few_bits.linear import FewBitsTile
from executor_svc.gpu.kernels.few_bits.widening import rows_at_once, widen
from executor_svc.gpu.kernels.linear_w8 import W8Tile
from executor_svc.gpu.kernels.quantize import quantize_fp8, quantize_int8, quantize_rows
from executor_svc.gpu.linear import (
    ALIGNMENT,
    Quantization,
    SumsWorkspace,
    check_fp8_shape,
    check_quantization,
    new_out,
    result_dtype,
)

T = TypeVar("T", W8Tile, FewBitsTile)


def tile_of(tiles: tuple[T, ...], rows: int) -> T:
    """Return the tile for so many rows: the least that holds them, or the largest."""
    return next((tile for tile in tiles if rows <= tile.rows), tiles[-1])


@dataclass(slots=True)
class ExactTiles:
    """The tiles that linears of one shape may use: at first the one that defines their bits, and no other."""

    possible: tuple[W8Tile, ...]
    used: tuple[W8Tile, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.used = tuple(tile for tile in self.possible if tile.rows == REFERENCE_ROWS)


@dataclass(slots=True)
class FewBitsTiles:
    """The same of weights in few bits."""

    possible: tuple[FewBitsTile, ...] = field(default_factory=few_bits_tiles)
    used: tuple[FewBitsTile, ...] = field(init=False)
    widened: ExactTiles | None = None
    """Whether more rows than the largest tile has are multiplied with the widened weight, by which tiles."""

    def __post_init__(self) -> None:
        self.used = tuple(tile for tile in self.possible if tile.rows == REFERENCE_ROWS)


class ExactLinear:
    """x @ weight.T + bias, with weights of 8, 16 or 32 bits, and with rows in fp8 if weights are multiplied so."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        quantization: Quantization,
        workspace: SumsWorkspace,
    ) -> None:
        """Take weight [out_features, in_features] and bias [out_features] or None, both in the model's dtype.

        Raises DeviceError naming the option if it does not support this GPU, dtype or shape, and ValueError for
        weights that are not finite.
        """
        check_quantization(quantization, weight.dtype, weight.device)
        self.out_features, self.in_features = weight.shape
        self.narrow_rows = quantization == "fp8_w8a8"
        self.scale: Tensor | None = None
        if quantization == "none":
            self.weight = weight.contiguous()
        else:
            if self.narrow_rows:
                check_fp8_shape(self.out_features, self.in_features)
            narrow, self.scale = (quantize_int8 if quantization == "int8" else quantize_fp8)(weight)
            # Padding with zeros: the kernel reads 16 bytes at a time.
            padding = (0, -self.in_features % ALIGNMENT)
            self.weight = functional.pad(narrow.view(torch.int8), padding).view(narrow.dtype).contiguous()
        self.bias = None if bias is None else bias.float().contiguous()
        self.tiles = ExactTiles(product_tiles(self.weight.element_size(), self.narrow_rows))
        self._workspace = workspace
        if not self.narrow_rows:
            workspace.reserve(sums_size(self.out_features, self.in_features))

    def __call__(self, x: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """Map [rows, in_features] to [rows, out_features], into `out` if given; out_dtype: that of x, or float32."""
        if out is None:
            out = new_out(x, self.out_features, out_dtype or x.dtype)
        result_dtype(x, out, out_dtype)
        self.multiply(x, out, tile_of(self.tiles.used, len(x)))
        return out

    def multiply(self, x: Tensor, out: Tensor, tile: W8Tile) -> None:
        """Write the product of rows x to out, by this tile."""
        scales = None
        if self.narrow_rows:
            narrow = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
            scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
            quantize_rows(x.contiguous(), narrow, scales)
            x = narrow
        exact_product(x, self.weight, self.bias, out, self._workspace.memory, self.scale, scales, tile)


def multiply_few_bits(
    x: Tensor, weight: FewBitsWeight, bias: Tensor, out: Tensor, workspace: Tensor | None, tiles: FewBitsTiles
) -> None:
    """Write x @ weight.T + bias to out, in its dtype; with many rows, if they may be, by the widened weight.

    Args:
        x: [M, columns] in 16 bits, contiguous.
        bias: [rows of the weight] float32.
        workspace: enough float32 numbers for both ways.
        tiles: of the weight.
    """
    if tiles.widened is None or len(x) <= tiles.used[-1].rows:
        exact_few_bits(x, weight, bias, out, workspace, tile_of(tiles.used, len(x)))
    else:
        multiply_widened(x, weight, bias, out, workspace, tile_of(tiles.widened.used, len(x)))


def multiply_widened(
    x: Tensor, weight: FewBitsWeight, bias: Tensor, out: Tensor, workspace: Tensor | None, tile: W8Tile
) -> None:
    """Write x @ weight.T + bias to out by the weight's numbers in 16 bits; arguments as of `multiply_few_bits`."""
    assert workspace is not None
    memory, (_, part) = workspace.view(x.dtype), few_bits_parts(weight)
    count = rows_at_once(weight)
    for first in range(0, weight.rows, count):
        last = min(first + count, weight.rows)
        wide = memory[: (last - first) * weight.columns].view(last - first, weight.columns)
        widen(weight, first, wide)
        # More rows than are split: no sums need the workspace.
        exact_product(x, wide, bias[first:last], out[:, first:last], None, tile=tile, part=part)
