"""Whether a packed weight is multiplied with int8 activations: `--quantized-activations`."""

from __future__ import annotations

from typing import Literal

from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.cpu.kernels.quantized.int8_steps import has_int8, row_steps
from executor_svc.cpu.kernels.quantized.layout import PackedLayout
from executor_svc.cpu.kernels.quantized.row_steps import RowSteps

QuantizedActivations = Literal["auto", "off", "int8"]


def int8_rows(
    isa: Isa, layout: PackedLayout, whole_row: bool, option: QuantizedActivations = "auto"
) -> RowSteps | None:
    """Return the int8 form of the rows of x that a packed weight multiplies; None: it multiplies rows as they are.

    auto and int8: every format that has integer products, on every level of x86-64.
    """
    if option == "off" or not isa.has("avx2") or not has_int8(layout.kind, whole_row):
        return None
    return row_steps(isa, layout, whole_row)
