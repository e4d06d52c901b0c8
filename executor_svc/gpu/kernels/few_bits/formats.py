"""The formats that kernels are compiled for ahead of time, and the types of their planes."""

from __future__ import annotations

from executor_svc.device.stored_linear import QuantFormat, ScaleType

COMMON = {
    "Q4_0": QuantFormat("Q4_0", bits=4, group=32, zero=8),
    "Q8_0": QuantFormat("Q8_0", bits=8, group=32, zero=128),
    "Q4_K": QuantFormat("Q4_K", bits=4, group=32, offsets="minimum", super_group=256),
    "Q5_K": QuantFormat("Q5_K", bits=5, group=32, offsets="minimum", super_group=256),
    "Q6_K": QuantFormat("Q6_K", bits=6, group=16, zero=32, super_group=256),
    "gptq": QuantFormat("gptq", bits=4, group=128, offsets="zero_point"),
    "fp8": QuantFormat("fp8", bits=8, group=128, values="e4m3", scale="float32"),
    "MXFP4": QuantFormat("MXFP4", bits=4, group=32, values="e2m1", scale="e8m0"),
}
"""By the words of a variant's name; kernels accept every format of `packed.is_supported`."""

_SCALES: dict[ScaleType, str] = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "e8m0": "*u8"}


def plane_types(kind: QuantFormat) -> dict[str, str]:
    """Return the type of each plane of a packed weight in Triton's notation; constexpr: it has no such plane."""
    supers, minimums = kind.super_group is not None, kind.offsets == "minimum"
    numbers = "*i8" if supers else _SCALES[kind.scale]
    there = {
        "codes": "*u8",
        "high": "*u8" if kind.bits in (5, 6) else None,
        "scales": numbers,
        "super_scales": _SCALES[kind.scale] if supers else None,
        "minimums": numbers if minimums else None,
        "super_minimums": _SCALES[kind.scale] if supers and minimums else None,
        "zero_points": "*u8" if kind.offsets == "zero_point" else None,
    }
    return {name: kind_of or "constexpr" for name, kind_of in there.items()}
