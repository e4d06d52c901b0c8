"""What launches need of `CpuKernels`, and the launches of products with dense weights in panels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.cpu.kernels import matmul
from executor_svc.cpu.kernels.amx import many_rows, product, row_tiles
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import Dtype
from executor_svc.cpu.kernels.codegen.team import KernelLaunch
from executor_svc.cpu.kernels.matmul_tiles import Output, has_pairs, has_tiles, widen_rows
from executor_svc.cpu.kernels.panel_layout import ROWS_AT_ONCE, Coming, coming_of
from executor_svc.cpu.kernels.rows import arrange

DTYPES: dict[torch.dtype, Dtype] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class Host:
    """What launches need of `CpuKernels`."""

    code: Code
    num_threads: int
    new: Callable[[str, tuple[int, ...], torch.dtype], Tensor]
    """Returns memory for a result, by its name, shape and dtype."""
    launch: Callable[[KernelLaunch, int], None]
    """Runs or records a launch, for so many rows."""
    launch_product: Callable[[KernelLaunch, int, Coming], None]
    """As `launch`, for a product that has two more arguments, `following` and `stride` of `PanelItem.coming`: the
    product before it gets these as its own."""
    scratch: Callable[[int], Tensor]
    """Returns memory of at least so many bytes for each thread, which the next launch may overwrite."""


@dataclass(frozen=True, slots=True)
class RowForms:
    """Rows of x in the forms in which dense products read them."""

    x: Tensor
    """[T, K], in the dtype of the weight where products read that."""
    factors: Tensor
    """x, or floats where a level has no products of bfloat16."""
    tiles: Tensor | None
    """Where a level has tiles: those of many rows (`amx.row_tiles`)."""
    dtype: torch.dtype
    """Of the model: what results are rounded to, and biases have."""
    weight_dtype: torch.dtype


def row_forms(host: Host, x: Tensor, dtype: torch.dtype) -> RowForms:
    """Return rows in the forms in which products with weights of a dtype read them.

    Rows of float32 that meet a weight of bfloat16 are rounded to it where the level multiplies that.
    """
    given, isa = x.dtype, host.code.isa
    if given != dtype and has_pairs(isa, DTYPES[dtype]):
        x = _arranged(host, x, dtype, x.shape[1])
    if has_tiles(isa, DTYPES[x.dtype]):
        tiles = host.new(f"tiles_{x.shape[1]}", row_tiles.padded(*x.shape), x.dtype)
        arguments = (x.data_ptr(), x.shape[1], tiles.data_ptr())
        kernel = row_tiles.row_tiles(host.code)
        host.launch(KernelLaunch(kernel, "rows", row_tiles.GROUP, 1, arguments, row_tiles.LEAST_ROWS), x.shape[0])
        return RowForms(x, x, tiles, given, dtype)
    factors = x if has_pairs(isa, DTYPES[x.dtype]) else widened(host, x, dtype)
    return RowForms(x, factors, None, given, dtype)


def launch_product(
    host: Host,
    rows: RowForms,
    panels: Tensor,
    bias: Tensor | None,
    y: Tensor,
    streams: int | None = None,
    joins: bool = False,
) -> None:
    """Launch y = x @ weight.T + bias for a weight in panels; streams: of `panel_item`; None: one for each thread.

    joins: as of `KernelLaunch`.
    """
    x, factors = rows.x, None if rows.weight_dtype == rows.dtype else DTYPES[rows.weight_dtype]
    streams = host.num_threads if rows.tiles is not None or streams is None else streams
    assert rows.factors.is_contiguous()
    assert y.is_contiguous()
    output = Output(DTYPES[rows.dtype], DTYPES[y.dtype], bias is not None, factors)
    sizes = (*x.shape[1:], y.shape[1], 0 if bias is None else bias.data_ptr(), streams)
    arguments = (rows.factors.data_ptr(), panels.data_ptr(), y.data_ptr(), *sizes)
    if rows.tiles is not None:
        kernel = product.matmul(host.code, output)
        arguments += (rows.tiles.data_ptr(), host.scratch(many_rows.scratch_bytes()).data_ptr())
    else:
        kernel = matmul.matmul(host.code, output)
    launch = KernelLaunch(kernel, "rows", ROWS_AT_ONCE, panels.shape[0], arguments, joins=joins)
    coming = coming_of(panels, panels.shape[0] if rows.tiles is not None else streams)
    host.launch_product(launch, x.shape[0], coming)


def _arranged(host: Host, x: Tensor, dtype: torch.dtype, columns: int) -> Tensor:
    """Return rows of float32 in a dtype, with zeros up to so many columns."""
    y = host.new(f"rounded_{columns}", (x.shape[0], columns), dtype)
    kernel = arrange(host.code, DTYPES[x.dtype], DTYPES[dtype], ordered=False)
    places = (x.data_ptr(), y.data_ptr(), 0, x.shape[1], columns)
    host.launch(KernelLaunch(kernel, "rows", 1, 1, places), x.shape[0])
    return y


def widened(host: Host, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows as floats, with a 0 after the last of an odd number that meets a weight of bfloat16."""
    even = x.shape[1] + x.shape[1] % 2
    if x.dtype == torch.float32:
        return x if dtype == x.dtype or even == x.shape[1] else _arranged(host, x, x.dtype, even)
    wide = host.new(f"widened_{x.shape[1]}", (x.shape[0], even), torch.float32)
    places = (x.data_ptr(), wide.data_ptr(), x.shape[1])
    host.launch(KernelLaunch(widen_rows(host.code), "rows", 1, 1, places), x.shape[0])
    return wide
