"""The metadata of a GGUF file about latent attention, as the fields of a config.json.

Keys and what stands for absent ones: llama.cpp's src/models/deepseek2.cpp and conversion/deepseek.py.
"""

from __future__ import annotations

from typing import Any

from cadenza_common.gguf.file import GgufFile

LATENTS = ("deepseek2", "mistral4")
"""Architectures of GGUF; the first stands for DeepSeek V2 and V3, and what is made like them, such as GLM-4.7-Flash."""
LOG_MULTIPLIER = 0.1
"""Factor of `mscale_all_dim` in their files."""
_SIGMOID = 2
_OF_GATING = {1: ("DeepseekV2ForCausalLM", "deepseek_v2"), _SIGMOID: ("DeepseekV3ForCausalLM", "deepseek_v3")}
_GLM_LAYERS, _GLM_VOCABULARY = (47, 48), 154_880
"""Of GLM-4.7-Flash, whose older files do not name its gating function."""


def latent_content(file: GgufFile, architecture: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of attention, and those that name the model; content: those that all families share.

    Raises GgufError.
    """
    metadata, found = file.metadata, latent_sizes(file, architecture)

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    if architecture == "mistral4":
        return found | _mistral(file, content)
    if key("attention.temperature_scale") in metadata:
        raise metadata.error(key("attention.temperature_scale"), "queries scaled by position are not supported here")
    glm = content["num_hidden_layers"] in _GLM_LAYERS and content["vocab_size"] == _GLM_VOCABULARY
    gating = metadata.integer(key("expert_gating_func"), _SIGMOID if glm else 1, at_least=0)
    if gating not in _OF_GATING:
        raise metadata.error(key("expert_gating_func"), f"is {gating}, which is not supported; supported: 1, 2")
    name, model_type = _OF_GATING[gating]
    groups = metadata.integer(key("expert_group_count"), 1)
    if gating != _SIGMOID:
        found["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    return found | {"architectures": [name], "model_type": model_type}


def latent_sizes(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Return the sizes of latents and heads; raises GgufError."""
    metadata = file.metadata

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    rope, length = metadata.integer(key("rope.dimension_count")), metadata.integer(key("attention.key_length"))
    head = metadata.integer(key("attention.key_length_mla"), length)
    value = metadata.integer(key("attention.value_length"), length)
    if head <= rope:
        raise metadata.error(key("attention.key_length"), f"{head} must be above rope.dimension_count {rope}")
    has_latent = not any(name.endswith(".attn_q.weight") for name in file.tensors)
    return {
        "kv_lora_rank": metadata.integer(key("attention.kv_lora_rank")),
        "q_lora_rank": metadata.integer(key("attention.q_lora_rank")) if has_latent else None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": head - rope,
        "v_head_dim": metadata.integer(key("attention.value_length_mla"), value),
    }


def _mistral(file: GgufFile, content: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding with the scale of queries by position; without a scaling there is none."""
    scaling, metadata, key = content.get("rope_scaling"), file.metadata, "mistral4.attention.temperature_scale"
    named = {"architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4"}
    if not scaling:
        return {**named, "rope_parameters": {"rope_type": "default"}}
    beta = metadata.number(key, 0.0)
    return {**named, "rope_scaling": scaling | ({"llama_4_scaling_beta": beta} if beta else {})}
