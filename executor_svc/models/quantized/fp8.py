"""Checkpoints with quant_method fp8: e4m3 with one scale per tensor, or one per block (weight_block_size)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cadenza_common.brief import brief
from executor_svc.device.stored_linear import QuantRows
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.quantized.group_numbers import Grouping
from executor_svc.models.quantized.options import log_fp8_activations, text_of
from executor_svc.models.quantized.row_major import open_fp8
from executor_svc.models.quantized.tensors import CheckpointTensors

_LARGEST_BLOCK = 1 << 16
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class Fp8:
    """Implements `method.Quantization`: a linear whose weight is stored in 8 bits is in few bits.

    Activations are not quantized: their scales are not needed.
    """

    grouping: Grouping

    def open(self, tensors: CheckpointTensors, prefix: str, shape: tuple[int, int]) -> QuantRows | None:
        """As in `method.Quantization`."""
        if tensors.require(f"{prefix}.weight").dtype not in _FP8:
            return None
        tensors.skip(f"{prefix}.input_scale")
        tensors.skip(f"{prefix}.activation_scale")
        inverse = tensors.find(f"{prefix}.weight_scale_inv") is not None
        # Both names hold numbers that multiply: "inverse" is meant from the quantizer's view.
        return open_fp8(tensors, prefix, shape, self.grouping, "weight_scale_inv" if inverse else "weight_scale")


def parse(fields: Fields) -> Fp8:
    """Return the options of fp8; raises ModelConfigError."""
    text_of(fields, "activation_scheme", "dynamic", ("dynamic", "static"))
    log_fp8_activations()
    text_of(fields, "fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    has_blocks = fields.get("weight_block_size") is not None
    return Fp8(block_of(fields, "weight_block_size") if has_blocks else Grouping("tensor"))


def block_of(fields: Fields, name: str) -> Grouping:
    """Return the [rows, columns] of the numbers that share a scale; raises ModelConfigError."""
    size = fields.get(name)
    whole = isinstance(size, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in size)
    if not whole or len(size) != 2 or not all(1 <= each <= _LARGEST_BLOCK for each in size):
        raise fields.error(name, f"must be [rows, columns] of a block, not {brief(size)}")
    return Grouping("block", (size[0], size[1]))
