"""Calibrated scales of a checkpoint's keys and values, for a cache in fp8: value = stored * scale.

One number for a layer, or one for each KV head, under any of the names that llm-compressor, vLLM, ModelOpt and older
tools use.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from cadenza_common.brief import brief
from executor_svc.device.kernels import KVScales
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.folder import LoaderError, read_json
from executor_svc.plan.description import LayerHeads

_KEY_SCALES = ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale")
_VALUE_SCALES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale")
_SHARED_SCALES = ("kv_scale", "attn.kv_scale")
_UNUSED_SCALES = ("q_scale", "attn.q_scale", "prob_scale", "attn.prob_scale")
"""Scales of queries and of attention weights, which Cadenza never keeps in fp8."""

SCALES = tuple(f".{name}" for name in (*_KEY_SCALES, *_VALUE_SCALES, *_SHARED_SCALES, *_UNUSED_SCALES))
"""Name suffixes of all scales, after the name of a layer's attention; none of these tensors is part of the model."""

_TOOLS = ("compressed-tensors", "modelopt")


class ScaleSource(Protocol):
    """A source of scales."""

    def get_scales(self, name: str, count: int) -> Tensor | None:
        """Return [count] float32 on the CPU, finite and above 0, or None; raises LoaderError for other values."""
        ...


def _is_for_fp8(quantization: Fields) -> bool:
    """Return whether a `quantization_config` specifies keys and values in symmetric fp8."""
    scheme = quantization.section("kv_cache_scheme")
    bits = None if scheme.get("num_bits") is None else scheme.integer("num_bits")
    is_symmetric = scheme.flag("symmetric", default=True)
    return (bits, scheme.text("type")) == (8, "float") and is_symmetric


def quantizes_kv_alone(quantization: Fields) -> bool:
    """Return whether a `quantization_config` quantizes nothing except keys and values, in fp8."""
    if quantization.get("quant_method") not in _TOOLS or quantization.get("quant_algo"):
        return False
    groups = quantization.section("config_groups")
    quantized = any(groups.section(name).get("targets") for name in groups.sections())
    return _is_for_fp8(quantization) and not quantized


def wants_fp8_kv_cache(folder: Path, content: dict[str, Any]) -> bool:
    """Return whether a checkpoint specifies keys and values in fp8, in config.json or in ModelOpt's own file.

    content: of config.json. Raises ModelConfigError or LoaderError for unreadable files, and for a checkpoint with
    another quantization in ModelOpt's file.
    """
    name = "hf_quant_config.json"
    quantization = Fields(read_json(folder, name, required=False), file=name).section("quantization")
    algorithm = quantization.text("quant_algo")
    if algorithm:
        raise LoaderError(
            f"model folder {folder}: {name}: quant_algo {brief(algorithm)}: quantized checkpoints are not supported"
        )
    return quantization.text("kv_cache_quant_algo") == "FP8" or _is_for_fp8(
        Fields(content).section("quantization_config")
    )


def read_kv_scales(
    source: ScaleSource, folder: Path, prefixes: Sequence[str], heads: Sequence[LayerHeads], device: torch.device
) -> tuple[KVScales | None, ...]:
    """Return the scales of each layer, on the device, None without scales; prefixes: names of the layers' attention.

    A layer that reads the keys and values of another one, or has no heads, has none.

    Raises LoaderError, naming the folder, if a layer has scales of keys or of values only.
    """
    found: list[KVScales | None] = []
    for prefix, layer in zip(prefixes, heads, strict=True):
        if layer.kv_of is not None or not layer.num_kv_heads:
            found.append(None)
            continue
        keys, values = _layer_scales(source, prefix, layer.num_kv_heads)
        if (keys is None) != (values is None):
            there, missing = ("v_scale", "k_scale") if keys is None else ("k_scale", "v_scale")
            raise LoaderError(f"model folder {folder}: {prefix} has a {there} and no {missing}: both are needed")
        found.append(None if keys is None or values is None else KVScales(keys.to(device), values.to(device)))
    return tuple(found)


def _layer_scales(source: ScaleSource, prefix: str, count: int) -> tuple[Tensor | None, Tensor | None]:
    keys, values = (_first_present(source, prefix, names, count) for names in (_KEY_SCALES, _VALUE_SCALES))
    if keys is None and values is None:
        keys = values = _first_present(source, prefix, _SHARED_SCALES, count)
    return keys, values


def _first_present(source: ScaleSource, prefix: str, names: tuple[str, ...], count: int) -> Tensor | None:
    """Return the scales of the first of these names that the source has."""
    found = (source.get_scales(f"{prefix}.{name}", count) for name in names)
    return next((scales for scales in found if scales is not None), None)
