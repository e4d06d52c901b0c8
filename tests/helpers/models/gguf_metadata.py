"""The metadata of a GGUF file, from config.json, as llama.cpp's conversion/*.py write them; needs gguf."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf

from tests.helpers.models import gguf_recurrent
from tests.helpers.models.gguf_gemma4 import write_gemma4

ARCHITECTURES = {
    "mistral": "llama",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "hunyuan_v1_dense": "hunyuan-dense",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone_moe": "exaone-moe",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "gpt_oss": "gpt-oss",
    "granitemoe_swa": "granite_swa",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "llama4_text": "llama4",
    "minimax_m2": "minimax-m2",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_neox": "gptneox",
    "phi": "phi2",
}
"""GGUF's by transformers' model_type, where they differ."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json by the names of fields that most families have."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = {"n_embd": "hidden_size", "n_positions": "max_position_embeddings", "n_head": "num_attention_heads"}
    names |= {
        "model_max_length": "max_position_embeddings",
        "n_layer": "num_hidden_layers",
        "n_inner": "intermediate_size",
        "ffn_hidden_size": "intermediate_size",
    }
    config |= {known: config[name] for name, known in names.items() if config.get(name)}
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type") or ()))
    heads = config["num_attention_heads"]
    if config["model_type"] == "llama4_text":
        sizes = {"moe_intermediate_size": config["intermediate_size"]}
        return config | sizes | {"intermediate_size": config["intermediate_size_mlp"]}
    if config["model_type"] == "falcon":
        return config | {"num_key_value_heads": config["num_kv_heads"] if config["new_decoder_architecture"] else 1}
    return config | ({"num_key_value_heads": heads} if config["model_type"] in ("gpt2", "gpt_neox") else {})


def architecture_of(config: dict[str, Any]) -> str:
    found = gguf_recurrent.architecture_of(config)
    return found or ARCHITECTURES.get(config["model_type"], config["model_type"])


_MIXTURES = (
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "llama4_text",
    "minimax_m2",
    "mistral4",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
)


def write_config(writer: Any, config: dict[str, Any], architecture: str) -> None:
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config.get("qk_rope_head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    theta = full.get("rope_theta", 10_000.0)
    if full.get("alpha"):
        theta *= full["alpha"] ** (head_size / (head_size - 2))
    writer.add_rope_freq_base(theta)
    _write_eps(writer, config)
    if architecture in ("llama", "granite"):
        writer.add_vocab_size(config["vocab_size"])
    share = full.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    writer.add_rope_dimension_count(int(head_size * share))
    if architecture in _LATENTS:
        _write_latents(writer, config)
    elif head_size * heads != config["hidden_size"] or architecture.startswith(("gemma", "qwen3")):
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
    _write_rope_scaling(writer, full, config)
    if full.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(full["llama_4_scaling_beta"])
    if full.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(full["mscale_all_dim"] * (0.1 if architecture in _LATENTS else 1))
    if config.get("layer_rope_theta"):
        writer.add_array(f"{architecture}.attention.rope_pattern", [bool(each) for each in config["layer_rope_theta"]])
    if architecture == "gptneox":
        writer.add_parallel_residual(config["use_parallel_residual"])
    if config["model_type"] in _MIXTURES or config.get("enable_moe_block"):
        _write_experts(writer, config)
    if config.get("logit_scale"):
        writer.add_logit_scale(config["logit_scale"])
    if architecture == "gemma4":
        write_gemma4(writer, config, rope)
    _write_windows(writer, config)
    if architecture != "falcon-h1":
        _write_factors(writer, config)
    if architecture in gguf_recurrent.NAMES:
        gguf_recurrent.write_metadata(writer, config, architecture)


def _write_eps(writer: Any, config: dict[str, Any]) -> None:
    eps = next(
        (
            config[name]
            for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
            if name in config
        ),
        None,
    )
    if eps is not None:
        writer.add_layer_norm_eps(eps)
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _write_windows(writer: Any, config: dict[str, Any]) -> None:
    if config["model_type"] in (
        "cohere2",
        "exaone4",
        "exaone_moe",
        "granite_swa",
        "granitemoe_swa",
        "olmo3",
    ) and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        if config["model_type"] != "cohere2":
            writer.add_sliding_window_pattern([each == "sliding_attention" for each in config["layer_types"]])
    if config["model_type"] in ("mistral", "phi3", "gemma2", "gemma3_text", "starcoder2"):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if config["model_type"] == "gemma3_text":
        writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
        if "full_attention" in config["layer_types"]:
            writer.add_sliding_window_pattern(config["layer_types"].index("full_attention") + 1)


_LATENTS = ("deepseek2", "kimi-linear", "mistral4")


def _write_latents(writer: Any, config: dict[str, Any]) -> None:
    """As llama.cpp's conversion/deepseek.py writes them: one KV head, whose values are the latent."""
    rope, size = config["qk_rope_head_dim"], config["kv_lora_rank"]
    writer.kv_data[0].pop(f"{writer.arch}.attention.head_count_kv")
    writer.add_head_count_kv(1)
    writer.add_kv_lora_rank(size)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(size + rope)
    writer.add_value_length(size)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])


def _write_factors(writer: Any, config: dict[str, Any]) -> None:
    for field, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("attention_multiplier", writer.add_attention_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
    ):
        if config.get(field):
            add(config[field])


_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
_COUNTS = ("num_local_experts", "num_experts", "moe_num_experts", "n_routed_experts")


def _write_experts(writer: Any, config: dict[str, Any]) -> None:
    """As llama.cpp's conversion/*.py write them."""
    size = config.get("moe_intermediate_size") or config["intermediate_size"]
    count = next(config[name] for name in _COUNTS if name in config)
    writer.add_expert_count(count)
    writer.add_expert_used_count(next(config[name] for name in _CHOSEN if name in config))
    if config["model_type"] not in ("mixtral", "olmoe"):
        writer.add_expert_feed_forward_length(size)
    match config["model_type"]:
        case "qwen2_moe":
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
        case "hunyuan_v1_moe":
            writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
        case "ernie4_5_moe":
            writer.add_expert_shared_count(config["moe_num_shared_experts"])
            writer.add_leading_dense_block_count(config["moe_layer_start_index"])
            writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        case "minimax_m2":
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        case "gpt_oss":
            writer.add_sliding_window(config["sliding_window"])
        case "granitemoe_swa" | "granitemoeshared":
            writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        case "llama4_text":
            writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
        case "exaone_moe":
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_expert_shared_count(config["num_shared_experts"])
            writer.add_leading_dense_block_count(config["first_k_dense_replace"])
            writer.add_expert_weights_scale(config["routed_scaling_factor"])
            writer.add_expert_weights_norm(config["norm_topk_prob"])
        case "glm4_moe" | "glm4_moe_lite" | "deepseek_v2" | "deepseek_v3" | "mistral4":
            softmax = config["model_type"] in ("deepseek_v2", "mistral4")
            kinds = gguf.ExpertGatingFuncType
            writer.add_expert_gating_func(kinds.SOFTMAX if softmax else kinds.SIGMOID)
            writer.add_expert_shared_count(config["n_shared_experts"])
            writer.add_leading_dense_block_count(config.get("first_k_dense_replace", 1))
            writer.add_expert_weights_scale(config["routed_scaling_factor"])
            writer.add_expert_weights_norm(config["norm_topk_prob"])
            writer.add_expert_group_count(config["n_group"])
            writer.add_expert_group_used_count(config["topk_group"])


def _write_rope_scaling(writer: Any, rope: dict[str, Any], config: dict[str, Any]) -> None:
    kind = rope.get("rope_type", "default")
    original: int = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings", 0)
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(original)
    if kind == "longrope":
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def rope_factors(config: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", rope["long_factor"]
        yield "rope_factors_short.weight", rope["short_factor"]
    if config["model_type"] == "gemma4_text":
        size = next(iter(config["per_layer_config"].values()))["head_dim"]
        rotated = int(size * rope["full_attention"]["partial_rotary_factor"] / 2)
        yield "rope_freqs.weight", [1.0] * rotated + [1e30] * (size // 2 - rotated)
    if rope.get("rope_type") == "llama3":
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        yield "rope_freqs.weight", [_llama3_factor(rope, rope["rope_theta"] ** (-i / size)) for i in range(0, size, 2)]


def _llama3_factor(rope: dict[str, Any], frequency: float) -> float:
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    share = min(1.0, max(0.0, (turns - low) / (high - low)))
    return 1.0 if share == 1 else float(1 / ((1 - share) / factor + share))
