"""Granite 4.0 (IBM, 2025): GraniteMoeHybridForCausalLM.

Mamba-2 in the place of attention in nine of ten layers (H), or attention alone; perhaps experts, beside an MLP that all
tokens share; mostly without rotary embedding. With the factors of Granite 3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import absent, rotated_where, whole_heads
from executor_svc.models.families.experts import read_router, with_experts, without_experts
from executor_svc.models.families.granite import multiplied
from executor_svc.models.families.llama import read_llama
from executor_svc.models.families.mixtures import GRANITE
from executor_svc.models.families.recurrent import (
    ATTENTION,
    LINEAR_TYPES,
    RECURRENT,
    layer_kinds,
    read_mamba,
    with_recurrence,
)
from executor_svc.models.specs.spec import DecoderSpec, ExpertsSpec, LayerNames

_NAMES = LayerNames(into_mlp=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
_KINDS = LINEAR_TYPES | {"mamba": RECURRENT, "attention": ATTENTION}
_MOST_EXPAND = 64


@absent(num_local_experts=8)
def read_granite_4(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    num_experts = fields.get("num_local_experts")
    shared, split = fields.integer("shared_intermediate_size", 1024), fields.flag("has_split_shared_mlp", False)
    dense = {"head_dim": whole_heads(fields), **without_experts(config), "mlp_bias": None}  # of no linear here
    if num_experts in (None, 0):
        dense["intermediate_size"] = shared
    spec = read_llama(dense)
    if num_experts in (None, 0) and not split:  # split: in GGUF files
        spec = replace(spec, names=_NAMES)
    is_rotated = fields.text("position_embedding_type") == "rope"
    spec = multiplied(rotated_where(spec, [is_rotated] * spec.num_layers), fields)
    name = (
        "layers_block_type" if fields.get("layer_types") is None and fields.get("layers_block_type") else "layer_types"
    )
    kinds = layer_kinds(fields, spec.num_layers, _KINDS, lambda layer: RECURRENT, name)
    if num_experts not in (None, 0):
        names = GRANITE
        if split:
            into = ("shared_mlp.gate_proj", "shared_mlp.up_proj")
            names = replace(names, shared_into=into, shared_down="shared_mlp.down_proj")
        router = read_router(fields, usual=(8, 2), scores="logits", weighing="softmax")
        spec = with_experts(spec, ExpertsSpec(router, spec.intermediate_size, names, shared_size=shared))
    if RECURRENT not in kinds:
        return spec
    inner = fields.integer("mamba_expand", 2, at_most=_MOST_EXPAND) * spec.hidden_size
    if fields.get("mamba_inner") is not None:  # in GGUF files
        inner = fields.integer("mamba_inner")
    return with_recurrence(spec, kinds, read_mamba(fields, inner, spec.norm_eps, (128, 1, 256)))
