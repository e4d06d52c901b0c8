"""The numbers of weights in few bits, in PyTorch: what every kernel is held against."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.device.stored_linear import QuantBlock, QuantFormat

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])

_NOT_A_NUMBER = 0x7F
"""Both codes of NaN of e4m3, without the sign."""


def dequantize(block: QuantBlock, kind: QuantFormat) -> Tensor:
    """Return the rows of a block as float32 [R, K]: each operation of the definition rounded to float32."""
    values = code_values(block, kind)
    groups = values.unflatten(1, (-1, kind.group))
    weight: Tensor = groups * scales_of(block, kind).unsqueeze(2)
    minimums = minimums_of(block, kind)
    if minimums is not None:
        weight = weight + minimums.unsqueeze(2)
    return weight.flatten(1)


def code_values(block: QuantBlock, kind: QuantFormat) -> Tensor:
    """Return value(code) as float32 [R, K], exact."""
    if kind.values == "table":
        return torch.tensor(kind.table, dtype=torch.float32)[block.codes.long()]
    if kind.values == "e2m1":
        return _E2M1[block.codes.long()]
    if kind.values == "e4m3":
        return block.codes.view(torch.float8_e4m3fn).float()
    if block.zero_points is None:
        return block.codes.float() - kind.zero
    zeros = block.zero_points.float().repeat_interleave(kind.group, dim=1)
    return block.codes.float() - zeros


def scales_of(block: QuantBlock, kind: QuantFormat) -> Tensor:
    """Return the scale of each group as float32 [R, G]."""
    if kind.scale == "e8m0" and kind.super_group is None:
        return block.scales.view(torch.float8_e8m0fnu).float()
    return _with_super(block.scales, block.super_scales, kind)


def scales_marking_nan(block: QuantBlock, kind: QuantFormat) -> Tensor:
    """Return scales as stored, NaN for groups with a code of NaN: kernels decode e4m3 without regard to it."""
    if kind.values != "e4m3":
        return block.scales
    bad = is_nan(block.codes)
    if not bool(bad.any()):
        return block.scales
    return block.scales.masked_fill(bad.unflatten(1, (-1, kind.group)).any(dim=2), float("nan"))


def is_nan(codes: Tensor) -> Tensor:
    """Return which codes of e4m3, in uint8, are NaN."""
    return (codes & _NOT_A_NUMBER) == _NOT_A_NUMBER


def minimums_of(block: QuantBlock, kind: QuantFormat) -> Tensor | None:
    """Return the minimum of each group as float32 [R, G], or None."""
    if block.minimums is None:
        return None
    return _with_super(block.minimums, block.super_minimums, kind)


def _with_super(numbers: Tensor, above: Tensor | None, kind: QuantFormat) -> Tensor:
    if above is None or kind.super_group is None:
        return numbers.float()
    return numbers.float() * above.float().repeat_interleave(kind.super_group // kind.group, dim=1)
