"""Reads the config.json of Llama checkpoints, of transformers 5 and of older versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from executor_svc.layers.rope import ROPE_TYPES, RopeConfig
from executor_svc.models.base import ModelConfigError


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The fields of config.json that shape the computation."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    tied: bool
    attention_bias: bool
    mlp_bias: bool


def _positive(config: dict[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelConfigError(f"config.json: {field} must be a positive integer, not {value!r}")
    return value


def _rope(config: dict[str, Any], max_positions: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) and `rope_theta` and `rope_scaling` (before), which go first as there."""
    older = dict(config.get("rope_scaling") or {})
    if "type" in older:
        older.setdefault("rope_type", older["type"])
    scaling = {**(config.get("rope_parameters") or {}), **older}
    kind = scaling.get("rope_type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelConfigError(f"config.json: rope_type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelConfigError("config.json: partial_rotary_factor other than 1 is not supported")
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    needed = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}[kind]
    for field in needed:
        if not isinstance(scaling.get(field), int | float):
            raise ModelConfigError(f"config.json: rope_type {kind} needs {field}")
    if kind == "default":
        return RopeConfig("default", theta)
    if kind == "linear":
        return RopeConfig("linear", theta, float(scaling["factor"]))
    original = scaling.get("original_max_position_embeddings") or max_positions
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    return RopeConfig("llama3", theta, float(scaling["factor"]), low, high, int(original))


def parse(config: dict[str, Any]) -> LlamaConfig:
    """Return the checked fields; raises ModelConfigError naming the one that is missing, wrong or not supported."""
    hidden_size = _positive(config, "hidden_size")
    num_heads = _positive(config, "num_attention_heads")
    num_kv_heads = _positive(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelConfigError(
            f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise ModelConfigError(
            f"config.json: hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}, and no head_dim"
        )
    head_size = _positive(config, "head_dim", hidden_size // num_heads)
    if head_size % 2:
        raise ModelConfigError(f"config.json: head_dim {head_size} is odd; rotary embedding needs an even one")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelConfigError(f"config.json: hidden_act {config['hidden_act']!r} is not supported; supported: silu")
    if config.get("quantization_config"):
        raise ModelConfigError("config.json: quantization_config: quantized checkpoints are not supported")
    max_positions = _positive(config, "max_position_embeddings", 2048)
    return LlamaConfig(
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=_positive(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_positions=max_positions,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config, max_positions),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )
