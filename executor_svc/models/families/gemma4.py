"""Gemma 4 (2026), text only: Gemma4ForCausalLM.

As Gemma 3, with norms of values, norms that multiply in fp32, a scalar for each layer, and layers of full attention
with heads of another size, fewer of them, and perhaps with keys as values (31B). The last layers may read the keys and
values of earlier ones, and layers may have an input of their own beside the hidden states (E2B, E4B). 26B-A4B has
experts beside the MLP of each layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from cadenza_common.brief import brief
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.config.rope_fields import read_rope
from executor_svc.models.families.common import layer_windows, read_common
from executor_svc.models.families.experts import read_router, with_experts, without_experts
from executor_svc.models.families.gemma import GELU, SANDWICHED, read_softcap
from executor_svc.models.layers.rope import RopeConfig
from executor_svc.models.layers.rope_scaling import ProportionalScaling
from executor_svc.models.specs.file_form import BesideNames
from executor_svc.models.specs.spec import (
    DecoderSpec,
    ExpertNames,
    ExpertsSpec,
    LayerInputs,
    LayerSizes,
    LayerSpec,
)

_POSITIONS = 131_072
_KV_HEADS, _HEAD_SIZE, _FULL_HEAD_SIZE = 4, 256, 512
_WINDOW, _EVERY = 512, 6
_INPUTS, _INPUTS_VOCABULARY = 256, 262_144
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES: dict[str, dict[str, Any]] = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
"""Of a config.json without any."""
_EXPERTS = ExpertNames(
    router="router.proj",
    router_scale="router.scale",
    weight_scales="router.per_expert_scale",
    into=("experts.{}.gate_proj", "experts.{}.up_proj"),
    down="experts.{}.down_proj",
    beside=BesideNames(),
)
_OWN = ("head_dim", "num_key_value_heads")
"""What a layer may have of its own in `per_layer_config`."""


def read_gemma4(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    causal = {"use_bidirectional_attention": None} if config.get("use_bidirectional_attention") == "vision" else {}
    spec = read_common(
        {"num_key_value_heads": _KV_HEADS} | without_experts(config) | causal,
        max_positions=_POSITIONS,
        head_size=_HEAD_SIZE,
        tied=True,
        read_rotary=_window_rope,
        activation=("hidden_activation", "gelu_pytorch_tanh", GELU),
    )
    layers = _layers(fields, spec)
    bias = fields.flag("attention_bias", False)
    unread = [index for index, layer in enumerate(layers) if layer.kv_of is not None]
    spec = replace(
        spec,
        layers=layers,
        qkv_bias=bias,
        output_bias=bias,
        names=SANDWICHED,
        norms_in_fp32=True,
        head_norms="heads",
        value_norm=True,
        attention_scale=1.0,
        layer_scalars=True,
        layer_inputs=_layer_inputs(fields, spec.vocab_size),
        embedding_scale=math.sqrt(spec.hidden_size),
        embedding_scale_rounded=True,
        logits_softcap=read_softcap(fields, "final_logit_softcapping", None),
        ignored=tuple(f"model.layers.{index}.self_attn.{name}" for index in unread for name in ("k_", "v_")),
    )
    if not fields.flag("enable_moe_block", False):
        return spec
    size = fields.integer("moe_intermediate_size")
    return with_experts(spec, ExpertsSpec(read_router(fields, rounded=False), size, _EXPERTS))


def _layers(fields: Fields, spec: DecoderSpec) -> tuple[LayerSpec, ...]:
    """Return all layers: their kind is that of `layer_types`, the last one has full attention."""
    window = fields.integer("sliding_window", _WINDOW)
    windows = layer_windows(fields, spec.num_layers, window, lambda index: (index + 1) % _EVERY != 0)
    windows[-1] = None
    num_shared = _count(fields, "num_kv_shared_layers", 0)
    if num_shared >= spec.num_layers:
        raise fields.error("num_kv_shared_layers", f"{num_shared} must be below num_hidden_layers {spec.num_layers}")
    sizes, layers = _Sizes.of(fields, spec), list[LayerSpec]()
    keys_are_values = fields.flag("attention_k_eq_v", False)
    wide = 2 if fields.flag("use_double_wide_mlp", False) else 1
    for index, each in enumerate(windows):
        own, kv_of = sizes.of_layer(index, each), None
        rope = _full_rope(fields, own.head_size) if each is None else _rope(fields, _SLIDING, own.head_size)
        if index >= spec.num_layers - num_shared:
            kv_of = _last_like(fields, windows[: spec.num_layers - num_shared], each)
            own = replace(own, intermediate_size=wide * own.intermediate_size)
            stored = layers[kv_of].sizes
            if stored is None or (stored.num_kv_heads, stored.head_size) != (own.num_kv_heads, own.head_size):
                raise fields.error("per_layer_config", f"gives layer {index} other heads than layer {kv_of}, whose "
                                   "keys and values it reads")  # fmt: skip
        shares = each is None and keys_are_values and kv_of is None
        layers.append(LayerSpec(rope, each, sizes=own, values_are_keys=shares, kv_of=kv_of))
    return tuple(layers)


def _last_like(fields: Fields, windows: list[int | None], window: int | None) -> int:
    """Return the last layer with keys and values of its own among those of the same kind."""
    found = [index for index, each in enumerate(windows) if each == window]
    if not found:
        kind = _FULL if window is None else _SLIDING
        raise fields.error("num_kv_shared_layers", f"leaves no layer of {kind} whose keys and values others could read")
    return found[-1]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The heads of layers: of those with a window, of the others, and of single ones."""

    fields: Fields
    num_heads: int
    windowed: LayerSizes
    full: LayerSizes
    single: Fields

    @staticmethod
    def of(fields: Fields, spec: DecoderSpec) -> _Sizes:
        windowed = LayerSizes(spec.num_kv_heads, spec.head_size, spec.intermediate_size)
        full, single = windowed, fields.section("per_layer_config")
        if not fields.has("per_layer_config"):  # files of transformers 5 since they have that
            full = replace(full, head_size=fields.integer("global_head_dim", _FULL_HEAD_SIZE))
            if fields.flag("attention_k_eq_v", False) and fields.get("num_global_key_value_heads") is not None:
                full = replace(full, num_kv_heads=fields.integer("num_global_key_value_heads"))
        found = _Sizes(fields, spec.num_heads, windowed, full, single)
        found.check(fields, "global_head_dim", "num_global_key_value_heads", full)
        return found

    def of_layer(self, index: int, window: int | None) -> LayerSizes:
        """Return a layer's sizes."""
        sizes, own = self.full if window is None else self.windowed, self.single.section(self._name(index))
        unknown = [name for name in own.names() if name not in _OWN]
        if unknown:
            raise own.error(unknown[0], f"is not supported here; supported: {', '.join(_OWN)}")
        sizes = replace(
            sizes,
            head_size=own.integer("head_dim", sizes.head_size),
            num_kv_heads=own.integer("num_key_value_heads", sizes.num_kv_heads),
        )
        self.check(own, "head_dim", "num_key_value_heads", sizes)
        return sizes

    def _name(self, index: int) -> str:
        """Return the layer's name in the section: transformers writes 05 for 5 where there are more than ten layers."""
        number = str(index)
        return next((name for name in self.single.names() if name.lstrip("0") == number.lstrip("0")), number)

    def check(self, fields: Fields, head_size: str, kv_heads: str, sizes: LayerSizes) -> None:
        """Raise ModelConfigError, by one of the two fields, for heads that cannot be."""
        if sizes.head_size % 2:
            raise fields.error(head_size, f"{sizes.head_size} is odd; rotary embedding needs an even one")
        if self.num_heads % sizes.num_kv_heads:
            raise fields.error(kv_heads, f"{sizes.num_kv_heads} does not divide num_attention_heads {self.num_heads}")


def _window_rope(fields: Fields, head_size: int, max_positions: int) -> RopeConfig:
    return _rope(fields, _SLIDING, head_size)


def _full_rope(fields: Fields, head_size: int) -> RopeConfig:
    section = _rope_section(fields, _FULL)
    if section.text("rope_type") != "proportional":
        return _rope(fields, _FULL, head_size)
    share = section.number("partial_rotary_factor", 1.0, at_least=0.0)
    if share > 1:
        raise section.error("partial_rotary_factor", f"{share:g} must be at most 1")
    if section.number("factor", 1.0) != 1.0:
        raise section.error("factor", "other than 1 is not supported here")
    plain = {"rope_theta": section.number("rope_theta", _ROPES[_FULL]["rope_theta"])}
    rope = read_rope(Fields(plain), head_size, max_positions=_POSITIONS)
    return replace(rope, scaling=ProportionalScaling(2 * int(share * head_size // 2)))


def _rope(fields: Fields, layer_type: str, head_size: int) -> RopeConfig:
    section, theta = _rope_section(fields, layer_type), _ROPES[layer_type]["rope_theta"]
    kinds = {"default": "default"}
    return read_rope(section, head_size, max_positions=_POSITIONS, theta=theta, kinds=kinds)


def _rope_section(fields: Fields, layer_type: str) -> Fields:
    by_type = fields.section("rope_parameters")
    if by_type.get("rope_type") or by_type.get("rope_theta"):
        raise fields.error("rope_parameters", "of Gemma 4 must have objects full_attention and sliding_attention")
    fields.refuse("rope_scaling", "Gemma 4 has rope_parameters")
    return by_type.section(layer_type) if by_type.get(layer_type) else Fields(_ROPES[layer_type])


def _layer_inputs(fields: Fields, vocab_size: int) -> LayerInputs | None:
    size = _count(fields, "hidden_size_per_layer_input", _INPUTS)
    if not size:
        return None
    rows = fields.integer("vocab_size_per_layer_input", _INPUTS_VOCABULARY)
    if rows < vocab_size:
        raise fields.error("vocab_size_per_layer_input", f"{rows} must be at least vocab_size {vocab_size}")
    return LayerInputs(size, rows)


def _count(fields: Fields, name: str, default: int) -> int:
    """Return an integer of at least 0; absent: the default; null: 0."""
    value = fields.get(name)
    if value == 0 and not isinstance(value, bool):
        return 0
    if value is None:
        return 0 if fields.has(name) else default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise fields.error(name, f"must be an integer of at least 0, not {brief(value)}")
    return fields.integer(name)
