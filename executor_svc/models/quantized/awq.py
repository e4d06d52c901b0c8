"""Checkpoints of AWQ (Lin et al., 2023), as AutoAWQ and llm-awq's gemm version store them."""

from __future__ import annotations

from dataclasses import dataclass

from executor_svc.device.stored_linear import QuantRows
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.quantized.column_major import open_awq
from executor_svc.models.quantized.options import group_of, text_of
from executor_svc.models.quantized.tensors import CheckpointTensors


@dataclass(frozen=True, slots=True)
class Awq:
    """Implements `method.Quantization`: a linear that has no dense weight is in few bits."""

    group: int | None

    def open(self, tensors: CheckpointTensors, prefix: str, shape: tuple[int, int]) -> QuantRows | None:
        """As in `method.Quantization`."""
        if tensors.find(f"{prefix}.weight") is not None:
            return None
        return open_awq(tensors, prefix, shape, self.group)


def parse(fields: Fields) -> Awq:
    """Return the options of AWQ: bits and group_size, or w_bit and q_group_size; raises ModelConfigError."""
    bits = "bits" if fields.has("bits") else "w_bit"
    if fields.integer(bits) != 4:
        raise fields.error(bits, f"is {fields.get(bits)}: AWQ is supported with 4 bits")
    text_of(fields, "version" if fields.has("version") else "format", "gemm", ("gemm",))
    text_of(fields, "backend", "auto", ("auto", "autoawq"))
    return Awq(group_of(fields, "group_size" if fields.has("group_size") else "q_group_size"))
