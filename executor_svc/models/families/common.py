"""The fields of config.json that all families share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from cadenza_common.brief import brief
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.config.rope_fields import DEFAULT_THETA, context_limit, read_rope, rope_section
from executor_svc.models.layers.mlp import Activation
from executor_svc.models.layers.rope import RopeConfig, Rounding
from executor_svc.models.specs.spec import DecoderSpec, LayerSpec

Reader = Callable[[dict[str, Any]], DecoderSpec]
RopeReader = Callable[[Fields, int, int], RopeConfig]

_SILU: dict[str, Activation] = {"silu": "silu", "swish": "silu"}
MAX_LAYERS = 10_000
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok")


def read_common(
    config: dict[str, Any],
    *,
    max_positions: int,
    head_size: int | None = None,
    eps: float = 1e-6,
    eps_field: str = "rms_norm_eps",
    tied: bool = False,
    read_rotary: RopeReader | None = None,
    activation: tuple[str, str, dict[str, Activation]] = ("hidden_act", "silu", _SILU),
    names: Mapping[str, str] = MappingProxyType({}),
) -> DecoderSpec:
    """Return the parts that all families share, with full attention in all layers; families replace the rest.

    Args:
        config: all of config.json.
        eps_field: the name of the norms' eps.
        max_positions, head_size, eps, tied: transformers' defaults of absent fields; the default head size is
        hidden_size / num_attention_heads.
        read_rotary: reads the rotary embedding from (all fields, head size, max_position_embeddings).
        activation: its field, its default, and the names that are supported.
        names: as of `Fields`; with one for intermediate_size, an MLP has four times the hidden size by default.
    """
    fields = Fields(config, names=names)
    _refuse_unsupported(fields)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_attention_heads", f"{num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    head_size = _head_size(fields, hidden_size, num_heads, head_size)
    positions = fields.integer("max_position_embeddings", max_positions)
    rope = (read_rotary or uniform_rope())(fields, head_size, positions)
    return DecoderSpec(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer(
            "intermediate_size", 4 * hidden_size if "intermediate_size" in names else None
        ),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        layers=(LayerSpec(rope),) * fields.integer("num_hidden_layers", at_most=MAX_LAYERS),
        context_limit=context_limit(positions, rope),
        norm_eps=fields.number(eps_field, eps),
        attention_scale=1 / math.sqrt(head_size),
        activation=_activation(fields, *activation),
        tied=fields.flag("tie_word_embeddings", tied),
    )


def absent(**defaults: Any) -> Callable[[Reader], Reader]:
    """Let a reader take these values, transformers' own, for fields that config.json does not have; null is one."""

    def decorate(read: Reader) -> Reader:
        @functools.wraps(read)
        def with_defaults(config: dict[str, Any]) -> DecoderSpec:
            return read(defaults | config)

        return with_defaults

    return decorate


def uniform_rope(
    *,
    theta: float = DEFAULT_THETA,
    partial: float | None = None,
    rounding: Rounding = "products",
    may_be_odd: bool = False,
) -> RopeReader:
    """Return the reader of a rotary embedding that is the same in all layers.

    theta, partial: transformers' defaults of absent fields; partial None: whole heads, required. rounding: as of
    `RopeConfig`; may_be_odd: as of `read_rope`.
    """

    def read(fields: Fields, head_size: int, max_positions: int) -> RopeConfig:
        share = fields.number("partial_rotary_factor", 1.0 if partial is None else partial)
        if partial is None and share != 1.0:
            raise fields.error("partial_rotary_factor", f"{share:g} is not supported here; supported: 1")
        original = fields.get("original_max_position_embeddings")
        return read_rope(
            rope_section(fields),
            head_size,
            max_positions=max_positions,
            theta=fields.number("rope_theta", theta),
            original=None if original is None else fields.integer("original_max_position_embeddings"),
            partial=None if partial is None else share,
            rounding=rounding,
            may_be_odd=may_be_odd,
        )

    return read


def whole_heads(fields: Fields) -> int:
    """Return the head size of families whose heads may leave some of the hidden size over."""
    return max(1, fields.integer("hidden_size") // fields.integer("num_attention_heads"))


def _head_size(fields: Fields, hidden_size: int, num_heads: int, default: int | None) -> int:
    if default is None and fields.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error("hidden_size", f"{hidden_size} is no multiple of num_attention_heads {num_heads}")
    head_size = fields.integer("head_dim", default or hidden_size // num_heads)
    if head_size % 2:
        raise fields.error("head_dim", f"{head_size} is odd; rotary embedding needs an even one")
    return head_size


def _activation(fields: Fields, name: str, default: str, supported: dict[str, Activation]) -> Activation:
    named = default if fields.get(name) is None else fields.get(name)
    if not isinstance(named, str) or named not in supported:
        raise fields.error(name, f"{brief(named)} is not supported; supported: {', '.join(supported)}")
    return supported[named]


def _refuse_unsupported(fields: Fields) -> None:
    for name in _EXPERTS:
        if fields.get(name) not in (None, 0) and fields.integer(name):
            raise fields.error(name, f"is {fields.get(name)}: mixtures of experts are not supported")
    fields.refuse("use_bidirectional_attention", "attention must be causal")


def with_windows(spec: DecoderSpec, windows: Iterable[int | None]) -> DecoderSpec:
    """Return the spec with a window for each layer."""
    layers = zip(spec.layers, windows, strict=True)
    return replace(spec, layers=tuple(replace(layer, window=window) for layer, window in layers))


def rotated_where(spec: DecoderSpec, rotated: Iterable[bool]) -> DecoderSpec:
    """Return the spec with no rotary embedding in the layers that have False."""
    layers = zip(spec.layers, rotated, strict=True)
    return replace(spec, layers=tuple(layer if each else replace(layer, rope=None) for layer, each in layers))


def layer_windows(
    fields: Fields, num_layers: int, window: int | None, default: Callable[[int], bool]
) -> list[int | None]:
    """Return the window of each layer by `layer_types`; if absent, `default(i)`: whether layer i has a window."""
    types = fields.get("layer_types")
    if types is None:
        types = ["sliding_attention" if default(i) else "full_attention" for i in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        shown = f"{len(types)} entries" if isinstance(types, list) else brief(types)
        raise fields.error("layer_types", f"must be a list with num_hidden_layers {num_layers} entries, not {shown}")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error(
                "layer_types", f"{brief(kind)} is not supported; supported: full_attention, sliding_attention"
            )
    if window is None and "sliding_attention" in types:
        raise fields.error("sliding_window", "must be a positive integer: layer_types has sliding_attention")
    return [window if kind == "sliding_attention" else None for kind in types]


def optional_window(fields: Fields, default: int | None) -> int | None:
    """Return `sliding_window`; null: no window; absent: the family's default."""
    if fields.has("sliding_window") and fields.get("sliding_window") is None:
        return None
    if not fields.has("sliding_window") and default is None:
        return None
    return fields.integer("sliding_window", default)
