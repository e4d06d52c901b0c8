"""Which of the tensors that a layer may have a model's files hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from executor_svc.models.specs.file_form import LAYERS
from executor_svc.models.specs.recurrent_spec import GatedDeltaSpec, MambaSpec
from executor_svc.models.specs.spec import DecoderSpec, LayerSpec


def with_stored_forms(spec: DecoderSpec, holds: Callable[[str], bool]) -> DecoderSpec:
    """Return the spec with the tensors that files have in layers of latent attention and of recurrences.

    holds: returns whether they have a tensor.
    """

    def has_only(index: int, name: str, other: str) -> bool:
        """Return whether a layer has the first of two tensors."""
        return holds(f"{LAYERS}.{index}.{name}") and not holds(f"{LAYERS}.{index}.{other}")

    def stored(index: int, layer: LayerSpec) -> LayerSpec:
        latent, recurrent = layer.latent, layer.recurrent
        if latent is not None and has_only(index, f"{latent.by_kind[0]}.weight", f"{latent.heads}.weight"):
            layer = replace(layer, latent=replace(latent, is_by_kind=True))
        if isinstance(recurrent, GatedDeltaSpec | MambaSpec) and has_only(
            index, recurrent.ready_decay, recurrent.decay
        ):
            layer = replace(layer, recurrent=replace(recurrent, is_decay_ready=True))
        return layer

    return replace(spec, layers=tuple(stored(*each) for each in enumerate(spec.layers)))
