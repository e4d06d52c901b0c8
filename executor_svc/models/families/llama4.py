"""Llama 4 (2025), text only: Llama4ForCausalLM.

Layers with a rotary embedding attend within chunks, to which norms of heads without weights belong. The others attend
to everything, and scale their queries by position. Some layers have experts, which read rows times the weights of the
choice, and one that all rows share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cadenza_common.brief import brief
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import absent, read_common, uniform_rope
from executor_svc.models.families.experts import read_router, with_experts, without_experts
from executor_svc.models.layers.rope import QueryScaling, RopeConfig
from executor_svc.models.specs.file_form import StackedForm
from executor_svc.models.specs.spec import DecoderSpec, ExpertNames, ExpertsSpec, LayerNames, LayerSpec

_POSITIONS = 131_072
_HEAD_SIZE, _WIDE = 128, 16_384
_THETA = 500_000.0
_EVERY = 4
_TUNED = 4
"""What the first files of Scout had for true in attn_temperature_tuning."""
_CHUNK = _FLOOR = 8192
_FULL, _CHUNKED = "full_attention", "chunked_attention"
_NAMES = LayerNames(
    into_mlp=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
_EXPERTS = ExpertNames(
    router="feed_forward.router",
    into=("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
    down="feed_forward.experts.{}.down_proj",
    shared_into=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    shared_down="feed_forward.shared_expert.down_proj",
    stacked=StackedForm(transposed=True),
)
_EXPERT_SIZE, _NUM_EXPERTS = 8192, 16


@absent(num_key_value_heads=8)
def read_llama4(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    spec = read_common(
        {**without_experts(config), "intermediate_size": fields.integer("intermediate_size_mlp", _WIDE)},
        max_positions=_POSITIONS,
        head_size=_HEAD_SIZE,
        eps=1e-5,
        read_rotary=uniform_rope(theta=_THETA, rounding="sum"),
    )
    bias, normed = fields.flag("attention_bias", False), fields.flag("use_qk_norm", True)
    spec = replace(
        spec,
        layers=_layers(fields, spec),
        qkv_bias=bias,
        output_bias=bias,
        names=_NAMES,
        rotary_pairs=spec.head_size,
        head_norms="heads after rope" if normed else None,
        head_norm_weights=False,
    )
    sparse = _sparse_layers(fields, spec.num_layers)
    if not sparse:
        return spec
    size = fields.integer("intermediate_size", _EXPERT_SIZE)
    router = read_router(
        Fields({"num_local_experts": _NUM_EXPERTS, "num_experts_per_tok": 1} | config),
        scores="logits",
        weighing="sigmoid",
        weighs_inputs=True,
    )
    return with_experts(spec, ExpertsSpec(router, size, _EXPERTS, shared_size=size), lambda layer: layer not in sparse)


def _sparse_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Return the layers that have experts."""
    named = fields.get("moe_layers")
    if named is None:
        step = fields.integer("interleave_moe_layer_step", 1, at_most=num_layers)
        return frozenset(range(step - 1, num_layers, step))
    if not isinstance(named, list) or any(
        not isinstance(each, int) or isinstance(each, bool) or not 0 <= each < num_layers for each in named
    ):
        raise fields.error("moe_layers", f"must be a list of layers from 0 to {num_layers - 1}, not {brief(named)}")
    return frozenset(named)


def _layers(fields: Fields, spec: DecoderSpec) -> tuple[LayerSpec, ...]:
    rotated, scaled, chunk = _rotated(fields, spec.num_layers), _scaled_rope(fields), None
    types = fields.get("layer_types")
    if types is None:
        types = [_CHUNKED if each else _FULL for each in rotated]
    if not isinstance(types, list) or len(types) != spec.num_layers:
        raise fields.error("layer_types", f"must be a list with num_hidden_layers {spec.num_layers} entries")
    for kind in types:
        if kind not in (_FULL, _CHUNKED):
            raise fields.error("layer_types", f"{brief(kind)} is not supported; supported: {_FULL}, {_CHUNKED}")
    if _CHUNKED in types:
        chunk = fields.integer("attention_chunk_size", _CHUNK)
    rope = spec.layers[0].rope
    return tuple(
        LayerSpec(rope if turned else scaled, chunk=chunk if kind == _CHUNKED else None, head_norms=turned)
        for kind, turned in zip(types, rotated, strict=True)
    )


def _rotated(fields: Fields, num_layers: int) -> list[bool]:
    """Return whether each layer rotates: `no_rope_layers` has 1 for those that do."""
    named = fields.get("no_rope_layers")
    if not named:
        every = fields.integer("no_rope_layer_interval", _EVERY)
        return [(index + 1) % every != 0 for index in range(num_layers)]
    if not isinstance(named, list) or len(named) != num_layers or any(each not in (0, 1) for each in named):
        raise fields.error("no_rope_layers", f"must be a list of 0 and 1 with num_hidden_layers {num_layers} entries")
    return [bool(each) for each in named]


def _scaled_rope(fields: Fields) -> RopeConfig | None:
    """Return what scales the queries of layers that do not rotate."""
    tuned = fields.get("attn_temperature_tuning")
    if tuned != _TUNED and not fields.flag("attn_temperature_tuning", True):
        return None
    beta = fields.number("attn_scale", 0.1, at_least=0.0)
    scaling = QueryScaling(beta, fields.integer("floor_scale", _FLOOR), first=1, rounded=False)
    return RopeConfig(_THETA, 0, query_scaling=scaling)
