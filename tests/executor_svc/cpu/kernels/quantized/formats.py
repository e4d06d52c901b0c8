"""Formats of weights in few bits, and random blocks of them."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.device.stored_linear import QuantBlock, QuantFormat

Q4_0 = QuantFormat("Q4_0", 4, 32, zero=8)
Q8_0 = QuantFormat("Q8_0", 8, 32, zero=128)
Q4_K = QuantFormat("Q4_K", 4, 32, super_group=256, offsets="minimum")
Q6_K = QuantFormat("Q6_K", 6, 16, zero=32, super_group=256)
INT8_ROWS = "int8 rows"
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_SIGNED = (8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0)
_FIXED = {
    "Q4_0": Q4_0,
    "Q4_1": QuantFormat("Q4_1", 4, 32, offsets="minimum"),
    "Q5_0": QuantFormat("Q5_0", 5, 32, zero=16),
    "Q5_1": QuantFormat("Q5_1", 5, 32, offsets="minimum"),
    "Q8_0": Q8_0,
    "Q4_K": Q4_K,
    "Q5_K": QuantFormat("Q5_K", 5, 32, super_group=256, offsets="minimum"),
    "Q6_K": Q6_K,
    "Q2_K": QuantFormat("Q2_K", 2, 16, super_group=256, offsets="minimum"),
    "Q3_K": QuantFormat("Q3_K", 3, 16, zero=4, super_group=256),
    "TQ2_0": QuantFormat("TQ2_0", 2, 256, zero=1),
    "IQ4_NL": QuantFormat("IQ4_NL", 4, 32, values="table", table=_IQ4),
    "IQ4_XS": QuantFormat("IQ4_XS", 4, 32, values="table", table=_IQ4, super_group=256),
    "IQ2_S": QuantFormat("IQ2_S", 4, 16, values="table", table=_SIGNED, super_group=256, scale="float32"),
    "gptq 4": QuantFormat("gptq 4", 4, 128, offsets="zero_point"),
    "gptq 8": QuantFormat("gptq 8", 8, 64, offsets="zero_point", scale="bfloat16"),
    "int4 by 16": QuantFormat("int4 by 16", 4, 16, zero=8, scale="bfloat16"),
    "fp8 blocks": QuantFormat("fp8 blocks", 8, 128, values="e4m3", scale="float32"),
    "mxfp4": QuantFormat("mxfp4", 4, 32, values="e2m1", scale="e8m0"),
}
_WHOLE_ROWS = (INT8_ROWS, "fp8 rows", "int4 rows")
FORMATS = (*_FIXED, *_WHOLE_ROWS)


def format_of(name: str, columns: int) -> QuantFormat:
    """Return a format by its name; those with one scale for a row depend on the number of columns."""
    if name == INT8_ROWS:
        return QuantFormat(name, 8, columns, zero=128, scale="float32")
    if name == "fp8 rows":
        return QuantFormat(name, 8, columns, values="e4m3", scale="bfloat16")
    if name == "int4 rows":
        return QuantFormat(name, 4, columns, offsets="zero_point")
    return _FIXED[name]


def random_block(kind: QuantFormat, rows: int, columns: int, seed: int) -> QuantBlock:
    """Return rows of a format with every code, scales around 0.01 of both signs, and zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    groups = columns // kind.group

    def integers(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (rows, count), generator=generator)

    def numbers(count: int) -> Tensor:
        if kind.scale == "e8m0":
            return integers(117, 124, count).to(torch.uint8)
        return (torch.randn(rows, count, generator=generator) / 100).to(getattr(torch, kind.scale))

    codes = integers(0, 2**kind.bits, columns).to(torch.uint8)
    if kind.values == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 0x7E
    supers = kind.super_group is not None
    above = columns // kind.super_group if kind.super_group else 0
    minimum = kind.offsets == "minimum"
    return QuantBlock(
        codes,
        scales=integers(-60, 64, groups).to(torch.int8) if supers else numbers(groups),
        super_scales=numbers(above) if supers else None,
        minimums=None if not minimum else integers(0, 64, groups).to(torch.int8) if supers else numbers(groups),
        super_minimums=numbers(above) if supers and minimum else None,
        zero_points=integers(0, 17 if kind.bits == 4 else 256, groups).to(torch.uint8)
        if kind.offsets == "zero_point"
        else None,
    )
