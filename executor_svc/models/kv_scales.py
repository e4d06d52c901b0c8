"""Scales that a checkpoint's keys and values were calibrated with, for a cache in fp8: stored times scale is meant.

One number for a layer, or one for each KV head, under any of the names that llm-compressor, vLLM, ModelOpt and older
tools have given them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from executor_svc.kernels.interface import KVScales
from executor_svc.model_folder import LoaderError

_OF_KEYS = ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale")
_OF_VALUES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale")
_OF_BOTH = ("kv_scale", "attn.kv_scale")
_OF_OTHERS = ("q_scale", "attn.q_scale", "prob_scale", "attn.prob_scale")
"""Queries and weights of values, which are never in fp8 here."""

ENDINGS = tuple(f".self_attn.{name}" for name in (*_OF_KEYS, *_OF_VALUES, *_OF_BOTH, *_OF_OTHERS))
"""Of the names of all such tensors: none is a part of the model."""


class ScaleSource(Protocol):
    """Where scales come from."""

    def get_scales(self, name: str, count: int) -> Tensor | None:
        """Return [count] float32 on the CPU, finite and above 0, or None; raises LoaderError for any others."""
        ...


def read_kv_scales(
    source: ScaleSource, folder: Path, num_layers: int, num_kv_heads: int, device: torch.device
) -> tuple[KVScales | None, ...]:
    """Return what there is for each layer, on the device.

    Raises LoaderError, naming the folder, where a layer has scales of keys or of values only.
    """
    found = []
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}.self_attn"
        keys, values = _of_layer(source, prefix, num_kv_heads)
        if (keys is None) != (values is None):
            there, missing = ("v_scale", "k_scale") if keys is None else ("k_scale", "v_scale")
            raise LoaderError(f"model folder {folder}: {prefix} has a {there} and no {missing}: both are needed")
        found.append(None if keys is None or values is None else KVScales(keys.to(device), values.to(device)))
    return tuple(found)


def _of_layer(source: ScaleSource, prefix: str, count: int) -> tuple[Tensor | None, Tensor | None]:
    keys, values = (_first(source, prefix, names, count) for names in (_OF_KEYS, _OF_VALUES))
    if keys is None and values is None:
        keys = values = _first(source, prefix, _OF_BOTH, count)
    return keys, values


def _first(source: ScaleSource, prefix: str, names: tuple[str, ...], count: int) -> Tensor | None:
    """Return the scales under the first of these names that is there."""
    found = (source.get_scales(f"{prefix}.{name}", count) for name in names)
    return next((scales for scales in found if scales is not None), None)
