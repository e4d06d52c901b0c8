"""`--quantization int8|int4` on the CPU: dense weights, rounded to few bits while they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device
from executor_svc.device.stored_linear import QuantBlock, QuantFormat, QuantRows
from executor_svc.models.base import StoredWeight, WeightSource
from executor_svc.models.folder import LoaderError
from executor_svc.models.specs.spec import LAYER_TABLE

Rounding = Literal["int8", "int4"]

GROUP = 32
INT8 = QuantFormat("int8", bits=8, group=GROUP, zero=128)
INT4 = QuantFormat("int4", bits=4, group=GROUP, zero=8)

TABLES = ("lm_head", "model.embed_tokens")
"""In 8 bits with int4, too: their errors reach the logits directly. So is the table of inputs of layers."""

_DENSE = ("self_attn.kv_b_proj", "self_attn.k_b_proj", "self_attn.v_b_proj")
"""They stay so: of latents, where each head has rows of its own and columns of its own (`device.latent`)."""


def rounding_of(config: ExecutorConfig, device: Device) -> Rounding | None:
    """Return what weights are rounded to while they are read; None: nothing, or the device quantizes by itself."""
    if device.name != "cpu" or config.quantization not in ("int8", "int4"):
        return None
    return config.quantization


def rounded_bytes(rounding: Rounding, num_elements: int) -> int:
    """Return the least bytes of so many rounded numbers, scales included."""
    return (INT8 if rounding == "int8" else INT4).num_bytes((1, num_elements // GROUP * GROUP))


class RoundedSource:
    """Implements `models.base.WeightSource` over a source of dense weights: linears and tables are in few bits.

    A weight whose columns are no whole groups of 32 stays dense, and so does what makes keys and values of latents.
    """

    def __init__(self, source: WeightSource, rounding: Rounding, listener: RoundedListener | None = None) -> None:
        """listener: receives everything that is read."""
        self._source = source
        self._rounding = rounding
        self._listener = listener

    def open(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        """As in `WeightSource`."""
        stored = self._source.open(name, shape)
        return stored if self._listener is None else self._listener.dense(name, stored)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """As in `WeightSource`."""
        if dtype is None:
            return self.open(name, shape).whole()
        tensor = self._source.get(name, shape, dtype)
        if self._listener is not None:
            self._listener.kept(name, tensor)
        return tensor

    def open_linear(self, prefix: str, shape: tuple[int, int]) -> StoredWeight | QuantRows:
        """As in `WeightSource`; raises LoaderError for a weight that is in few bits already."""
        stored = self._source.open_linear(prefix, shape)
        if isinstance(stored, QuantRows):
            raise LoaderError(
                f"--quantization {self._rounding}: {prefix} of the checkpoint is in few bits already "
                f"({stored.format.name}); use --quantization none"
            )
        if shape[1] % GROUP or prefix.endswith(_DENSE):
            return stored if self._listener is None else self._listener.dense(f"{prefix}.weight", stored)
        kind = INT4 if self._rounding == "int4" and prefix not in (*TABLES, LAYER_TABLE) else INT8
        rows: QuantRows = RoundedRows(prefix, stored, kind)
        return rows if self._listener is None else self._listener.rounded(prefix, rows)


class RoundedListener(Protocol):
    """Receives the tensors of a `RoundedSource` as they are read, such as to save them."""

    def dense(self, name: str, stored: StoredWeight) -> StoredWeight:
        """Return a tensor whose reads the listener sees."""
        ...

    def kept(self, name: str, tensor: Tensor) -> None:
        """Take a tensor that is used in a dtype of its own."""
        ...

    def rounded(self, prefix: str, rows: QuantRows) -> QuantRows:
        """Return a weight whose reads the listener sees."""
        ...


class RoundedRows:
    """Implements `QuantRows`: a dense weight, rounded block by block."""

    column_order: Tensor | None = None
    whole_row_activations: bool = False

    def __init__(self, prefix: str, stored: StoredWeight, kind: QuantFormat) -> None:
        """prefix: the linear's name, for errors."""
        self.shape: tuple[int, int] = (stored.shape[0], stored.shape[1])
        self.format = kind
        self._prefix = prefix
        self._stored = stored

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[QuantBlock]:
        """As in `QuantRows`; raises LoaderError for numbers that are not finite."""
        rows = multiple * max(1, num_bytes // (multiple * self.shape[1]))
        for block in self._stored.blocks(rows):
            rounded = round_to_nearest(block, self.format)
            if not bool(rounded.scales.isfinite().all()):
                raise LoaderError(f"--quantization {self.format.name}: {self._prefix}.weight has NaN or huge numbers")
            yield rounded


def round_to_nearest(rows: Tensor, kind: QuantFormat) -> QuantBlock:
    """Return rows [R, K] in a symmetric format with float16 scales: of 8 bits, or of 4.

    8 bits: the largest magnitude of a group is 127 times its scale (as in Q8_0). 4 bits: the number of the largest
    magnitude is -8 times the scale, which has the other sign (as in Q4_0). Numbers are divided by the rounded scale.
    """
    groups = rows.float().unflatten(1, (-1, kind.group))
    if kind.bits == 8:
        scales = groups.abs().amax(2) / 127
    else:
        extremes = torch.stack(torch.aminmax(groups, dim=2))
        scales = torch.where(-extremes[0] >= extremes[1], extremes[0], extremes[1]) / -8
    rounded = scales.half()
    inverse = torch.where(rounded == 0, 0.0, 1 / rounded.float())
    codes = (groups * inverse.unsqueeze(2)).round_().clamp_(-kind.zero, kind.zero - 1).add_(kind.zero)
    return QuantBlock(codes.flatten(1).to(torch.uint8), rounded)
