"""Scales that a checkpoint's keys and values were calibrated with, for a cache in fp8: stored times scale is meant.

One number for a layer, or one for each KV head, under any of the names that llm-compressor, vLLM, ModelOpt and older
tools have given them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from executor_svc.device.kernels import KVScales
from executor_svc.models.config_fields import Fields
from executor_svc.models.folder import LoaderError, read_json

_OF_KEYS = ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale")
_OF_VALUES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale")
_OF_BOTH = ("kv_scale", "attn.kv_scale")
_OF_OTHERS = ("q_scale", "attn.q_scale", "prob_scale", "attn.prob_scale")
"""Queries and weights of values, which are never in fp8 here."""

SCALES = tuple(f".{name}" for name in (*_OF_KEYS, *_OF_VALUES, *_OF_BOTH, *_OF_OTHERS))
"""Endings of the names of all such tensors, behind the name of a layer's attention: none is a part of the model."""

_TOOLS = ("compressed-tensors", "modelopt")


class ScaleSource(Protocol):
    """Where scales come from."""

    def get_scales(self, name: str, count: int) -> Tensor | None:
        """Return [count] float32 on the CPU, finite and above 0, or None; raises LoaderError for any others."""
        ...


def _is_for_fp8(quantization: Fields) -> bool:
    """Return whether a `quantization_config` says that keys and values are for fp8, symmetric."""
    scheme = quantization.section("kv_cache_scheme")
    return (scheme.get("num_bits"), scheme.get("type")) == (8, "float") and scheme.get("symmetric") is not False


def quantizes_kv_alone(quantization: Fields) -> bool:
    """Return whether all that a `quantization_config` says of a checkpoint are scales for keys and values in fp8."""
    if quantization.get("quant_method") not in _TOOLS or quantization.get("quant_algo"):
        return False
    groups = quantization.section("config_groups")
    quantized = any(groups.section(name).get("targets") for name in groups.sections())
    return _is_for_fp8(quantization) and not quantized


def asks_for_fp8(folder: Path, content: dict[str, Any]) -> bool:
    """Return whether a checkpoint says that its keys and values are for fp8, in config.json or in ModelOpt's own file.

    content: of config.json. Raises ModelConfigError or LoaderError for files that can not be read, and for a checkpoint
    that is quantized otherwise by ModelOpt's file.
    """
    found = read_json(folder, "hf_quant_config.json", required=False).get("quantization")
    theirs = found if isinstance(found, dict) else {}
    if theirs.get("quant_algo"):
        raise LoaderError(
            f"model folder {folder}: hf_quant_config.json: quant_algo {theirs['quant_algo']!r}: quantized checkpoints "
            "are not supported"
        )
    return theirs.get("kv_cache_quant_algo") == "FP8" or _is_for_fp8(Fields(content).section("quantization_config"))


def read_kv_scales(
    source: ScaleSource, folder: Path, prefixes: Sequence[str], num_kv_heads: int, device: torch.device
) -> tuple[KVScales | None, ...]:
    """Return what there is for each layer, on the device; prefixes: names of the layers' attention.

    Raises LoaderError, naming the folder, where a layer has scales of keys or of values only.
    """
    found = []
    for prefix in prefixes:
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
