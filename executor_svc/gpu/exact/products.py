"""The products of a model in `--numerics exact`, and their comparison with each other on the GPU at hand.

The bits of a product are those of its reference tile. Other tiles, faster for few rows or for many, are used where they
have given the same bits for random rows: so a GPU on which they do not is slower, not wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.device.interface import NumericsError
from executor_svc.gpu.exact.linear import ExactLinear, ExactTiles, FewBitsTiles, multiply_widened
from executor_svc.gpu.kernels.exact.few_bits import exact_few_bits
from executor_svc.gpu.kernels.exact.tiles import REFERENCE_ROWS, product_tiles
from executor_svc.gpu.kernels.few_bits.layout import FewBitsWeight
from executor_svc.gpu.kernels.few_bits.linear import FewBitsTile
from executor_svc.gpu.kernels.linear_w8 import W8Tile
from executor_svc.gpu.linear import Quantization, SumsWorkspace

_MOST_ROWS = 200
"""Rows that are compared: more than a tile has, and no multiple of it."""

Multiply = Callable[[Tensor, Tensor], None]
"""Writes the product of its first argument, rows, to the second."""


@dataclass(frozen=True, slots=True)
class _Probed:
    """A shape of linears, one of which is compared if it is still there."""

    name: str
    linear: weakref.ref[ExactLinear] | weakref.ref[FewBitsWeight]
    tiles: ExactTiles | FewBitsTiles
    dtype: torch.dtype
    """Of rows."""


class ExactProducts:
    """Makes exact linears, of which those of one shape have one choice of tiles."""

    def __init__(self, workspace: SumsWorkspace) -> None:
        self._workspace = workspace
        self._shapes: dict[Hashable, _Probed] = {}
        self._done: set[Hashable] = set()

    def linear(
        self, name: str, weight: Tensor, bias: Tensor | None, quantization: Quantization = "none"
    ) -> ExactLinear:
        """Prepare weight [out_features, in_features]; errors as of `ExactLinear`."""
        made = ExactLinear(weight, bias, quantization, self._workspace)
        key = tuple(weight.shape), weight.dtype, quantization
        known = self._shapes.get(key)
        if known is None or known.linear() is None:
            tiles = made.tiles if known is None else known.tiles
            self._shapes[key] = known = _Probed(name, weakref.ref(made), tiles, weight.dtype)
        assert isinstance(known.tiles, ExactTiles)
        made.tiles = known.tiles
        return made

    def few_bits(self, name: str, weight: FewBitsWeight, dtype: torch.dtype) -> FewBitsTiles:
        """Return the choice of tiles for a weight in few bits, and rows of this dtype."""
        key = weight.layout, weight.rows, dtype
        known = self._shapes.get(key)
        if known is None or known.linear() is None:
            tiles = FewBitsTiles() if known is None else known.tiles
            self._shapes[key] = known = _Probed(name, weakref.ref(weight), tiles, dtype)
        assert isinstance(known.tiles, FewBitsTiles)
        return known.tiles

    def probe(self, max_rows: int) -> None:
        """Compare what was made since the last time, for up to max_rows rows, and choose tiles.

        Raises NumericsError, naming a linear, if rows depend on each other, whatever the tile.
        """
        for key, shape in self._shapes.items():
            linear = shape.linear()
            if key in self._done or linear is None:
                continue
            self._done.add(key)
            if isinstance(linear, ExactLinear):
                assert isinstance(shape.tiles, ExactTiles)
                self._probe_dense(shape, linear, shape.tiles, max_rows)
            else:
                assert isinstance(shape.tiles, FewBitsTiles)
                self._probe_few_bits(shape, linear, shape.tiles, max_rows)

    def _probe_dense(self, shape: _Probed, linear: ExactLinear, tiles: ExactTiles, max_rows: int) -> None:
        def by(tile: W8Tile) -> Multiply:
            return lambda x, out: linear.multiply(x, out, tile)

        x, (reference,) = _rows(linear.weight, linear.in_features, shape.dtype, max_rows), tiles.used
        bits = _reference_bits(shape.name, x, linear.out_features, by(reference))
        tiles.used = tuple(tile for tile in tiles.possible if _agrees(bits, x, tile.rows, by(tile)))

    def _probe_few_bits(self, shape: _Probed, weight: FewBitsWeight, tiles: FewBitsTiles, max_rows: int) -> None:
        memory, (reference,) = self._workspace.memory, tiles.used
        assert memory is not None, "linears in few bits have reserved it"
        x = _rows(memory, weight.columns, shape.dtype, max_rows)
        bias = torch.zeros(weight.rows, dtype=torch.float32, device=x.device)

        def by(tile: FewBitsTile) -> Multiply:
            return lambda x, out: exact_few_bits(x, weight, bias, out, memory, tile)

        def widened_by(tile: W8Tile) -> Multiply:
            return lambda x, out: multiply_widened(x, weight, bias, out, memory, tile)

        bits = _reference_bits(shape.name, x, weight.rows, by(reference))
        tiles.used = tuple(tile for tile in tiles.possible if _agrees(bits, x, tile.rows, by(tile)))
        if len(x) <= tiles.used[-1].rows:
            return
        widened, size = ExactTiles(product_tiles(2)), weight.rows
        large = [tile for tile in widened.possible if tile.rows >= REFERENCE_ROWS]
        found = [tile for tile in large if torch.equal(_product(x, size, widened_by(tile)), bits)]
        if found:
            widened.used, tiles.widened = tuple(found), widened


def _rows(beside: Tensor, columns: int, dtype: torch.dtype, max_rows: int) -> Tensor:
    """Return random rows, at least two, on the device of a tensor."""
    generator = torch.Generator(beside.device).manual_seed(0)
    size = max(2, min(max_rows, _MOST_ROWS)), columns
    return torch.randn(size, generator=generator, device=beside.device).to(dtype)


def _reference_bits(name: str, x: Tensor, out_features: int, multiply: Multiply) -> Tensor:
    """Return the bits of all rows; raises NumericsError if some have others alone, or in as many as a tile has."""
    bits = _product(x, out_features, multiply)
    middle = len(x) // 2
    for first, last in ((0, 1), (middle, middle + 1), (len(x) - 1, len(x)), (1, min(len(x), 1 + REFERENCE_ROWS))):
        if not torch.equal(_product(x[first:last].clone(), out_features, multiply), bits[first:last]):
            raise NumericsError(
                f"linear {name} (in {x.shape[1]}, out {out_features}, {x.dtype}): rows {first} to {last - 1} have "
                f"other bits beside {len(x)} rows; this GPU cannot guarantee exact numerics, use --numerics fast"
            )
    return bits


def _agrees(bits: Tensor, x: Tensor, tile_rows: int, multiply: Multiply) -> bool:
    """Return whether a tile gives these bits: to one row, to as many as it has, and to all."""
    counts, out_features = {1, min(tile_rows, len(x)), len(x)}, bits.shape[1]
    return all(torch.equal(_product(x[:rows], out_features, multiply), bits[:rows]) for rows in counts)


def _product(x: Tensor, out_features: int, multiply: Multiply) -> Tensor:
    """Return the bits of a product, which are more in float32 than in 16 bits."""
    out = torch.empty(len(x), out_features, dtype=torch.float32, device=x.device)
    multiply(x, out)
    return out.view(torch.int32)
