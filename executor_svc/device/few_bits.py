"""What a device holds of weights in few bits: for its fingerprint, and for the bytes that weights take."""

from __future__ import annotations

from typing import Literal

import torch

from executor_svc.device.stored_linear import QuantFormat, QuantRows

Form = Literal["dense", "weights alone", "int8", "int8 whole row"]
"""How a weight is multiplied: dequantized at the start; unpacked in the product; with activations in int8, a
scale for each 32 of them or for a row."""


class FewBits:
    """The formats of the prepared weights in few bits, and the form of each; filled by the device."""

    def __init__(self) -> None:
        self._forms: dict[tuple[QuantFormat, Form], str] = {}
        self.saved_bytes = 0
        """Bytes that the weights take less than in the model's dtype."""

    @property
    def forms(self) -> tuple[str, ...]:
        """Every format and form; empty for a model of dense weights. Part of the numerics fingerprint."""
        return tuple(sorted(f"{_facts(kind)}: {form}" for kind, form in self._forms))

    @property
    def summary(self) -> str:
        """The forms by the formats' names, for the log."""
        return ", ".join(sorted({f"{name}: {form}" for (_, form), name in self._forms.items()}))

    def add(self, part: QuantRows, dtype: torch.dtype, form: Form, num_bytes: int) -> None:
        """Note a weight of a model of this dtype that takes so many bytes."""
        self._forms.setdefault((part.format, form), part.format.name)
        self.saved_bytes += part.shape[0] * part.shape[1] * dtype.itemsize - num_bytes

    def add_dense(self, part: QuantRows) -> None:
        """Note a weight that is held in the model's dtype."""
        self._forms.setdefault((part.format, "dense"), part.format.name)


def _facts(kind: QuantFormat) -> str:
    """Return everything of a format that the numbers depend on, without its name."""
    scales = f"{kind.scale} scales by {kind.group} and {kind.super_group}"
    return f"{kind.bits} bits, {kind.values}, zero {kind.zero}, {scales}, {kind.offsets}"
