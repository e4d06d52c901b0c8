"""Checkpoints with quant_method mxfp4: OpenAI's blocks and scales."""

from __future__ import annotations

from dataclasses import dataclass

from executor_svc.device.stored_linear import QuantRows
from executor_svc.models.config_fields import Fields
from executor_svc.models.quantized.row_major import open_mxfp4
from executor_svc.models.quantized.tensors import CheckpointTensors


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Implements `method.Quantization`: a linear that has no dense weight is in few bits."""

    def open(self, tensors: CheckpointTensors, prefix: str, shape: tuple[int, int]) -> QuantRows | None:
        """As in `method.Quantization`."""
        if tensors.find(f"{prefix}.weight") is not None:
            return None
        return open_mxfp4(tensors, prefix, shape, "weight_blocks", "weight_scales")


def parse(fields: Fields) -> Mxfp4:
    """Return the options of MXFP4: there are none that change numbers."""
    return Mxfp4()
