"""The metadata of a GGUF file about experts, as the fields of a config.json.

Keys and what stands for absent ones: llama.cpp's src/models/*.cpp and conversion/*.py.
"""

from __future__ import annotations

from typing import Any

from cadenza_common.gguf.file import GgufFile
from executor_svc.models.gguf.latent_content import LATENTS, latent_content

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
"""The fields of config.json of how many experts a layer has, and a token chooses."""
MAX_LAYERS = 10_000
"""As many as a config.json may have."""
MIXTURES = {
    **dict.fromkeys(LATENTS, ("DeepseekV3ForCausalLM", "deepseek_v3")),
    "ernie4_5-moe": ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
    "exaone-moe": ("ExaoneMoeForCausalLM", "exaone_moe"),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text"),
    "glm4moe": ("Glm4MoeForCausalLM", "glm4_moe"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "granite_swa": ("GraniteMoeSWAForCausalLM", "granitemoe_swa"),
    "granitemoe": ("GraniteMoeForCausalLM", "granitemoe"),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe"),
    "llama": ("MixtralForCausalLM", "mixtral"),
    "llama4": ("Llama4ForCausalLM", "llama4_text"),
    "minimax-m2": ("MiniMaxM2ForCausalLM", "minimax_m2"),
    "olmoe": ("OlmoeForCausalLM", "olmoe"),
    "phimoe": ("PhimoeForCausalLM", "phimoe"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
"""Architecture and model_type of config.json by GGUF's architecture, where it has experts."""
_SIGMOID = ("exaone-moe", "glm4moe", "llama4", "minimax-m2")
_OF_CHOSEN = ("gpt-oss", "granite_swa", "granitemoe")
_LLAMA4_EVERY = 4
_MOST_LLAMA4_WITH_NORMS = 128
"""Llama 4 of as many experts has no norms of heads, which files do not say."""


def expert_content(file: GgufFile, architecture: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of one family's experts; content: those that all families share. Raises GgufError."""
    metadata = file.metadata

    def integer(name: str, default: int | None = None) -> int:
        return metadata.integer(f"{architecture}.{name}", default, at_least=0)

    if architecture not in LATENTS:
        _check_gating(file, architecture)
    name, model_type = MIXTURES[architecture]
    size = _uniform(file, f"{architecture}.expert_feed_forward_length", content["intermediate_size"])
    found = {
        "architectures": [name],
        "model_type": model_type,
        "num_experts": integer("expert_count"),
        "num_experts_per_tok": integer("expert_used_count"),
        "moe_intermediate_size": size,
    }
    shared = integer("expert_shared_feed_forward_length", 0)
    match architecture:
        case "qwen2moe":
            found |= {"shared_expert_intermediate_size": shared or content["intermediate_size"], "qkv_bias": True}
        case "qwen3moe":
            found |= {"norm_topk_prob": True}
        case "glm4moe":
            found |= {"use_qk_norm": any(name.endswith(".attn_q_norm.weight") for name in file.tensors)}
            found |= _of_sigmoid(file, architecture, content)
        case "deepseek2" | "mistral4":
            found |= _of_sigmoid(file, architecture, content)
            found |= latent_content(file, architecture, content)
        case "exaone-moe":
            found |= _of_sigmoid(file, architecture, content)
        case "gemma4":
            found |= {"enable_moe_block": True}
        case "llama4":
            found |= _llama4(file, content, integer("expert_count"))
            found |= {"intermediate_size": size, "intermediate_size_mlp": content["intermediate_size"]}
        case "phimoe":
            found |= {"lm_head_bias": "output.bias" in file.tensors}
        case "granite_swa" | "granitemoe":
            split = any(".ffn_gate_shexp." in name for name in file.tensors)
            found |= {"shared_intermediate_size": shared, "has_split_shared_mlp": split}
        case "ernie4_5-moe":
            found |= {
                "use_bias": content["attention_bias"] or content["mlp_bias"],
                "moe_num_shared_experts": integer("expert_shared_count", 0),
                "moe_layer_start_index": integer("leading_dense_block_count", 0),
                "moe_layer_interval": integer("interleave_moe_layer_step", 1),
            }
        case "hunyuan-moe":
            # Older files state the experts' size, which is the shared one's, too.
            found |= {"intermediate_size": shared or content["intermediate_size"]}
        case "minimax-m2":
            found |= {"intermediate_size": size}
        case "gpt-oss":
            found |= {"intermediate_size": size, **_gpt_oss(file, content)}
        case "olmoe":
            found |= {"intermediate_size": size}
    return found


def _check_gating(file: GgufFile, architecture: str) -> None:
    """Raise GgufError if a file says that its router is another one than the architecture's; 0: it does not say."""
    own = {2} if architecture in _SIGMOID else {1, 3} if architecture in _OF_CHOSEN else {1}
    key = f"{architecture}.expert_gating_func"
    found = file.metadata.integer(key, 0, at_least=0)
    if found not in {0, *own}:
        supported = ", ".join(map(str, sorted(own)))
        raise file.metadata.error(key, f"is {found}, which is not supported; supported: {supported}")


def _uniform(file: GgufFile, key: str, default: int) -> int:
    """Return an integer that may be given for each layer; dense ones have 0."""
    metadata = file.metadata
    if not isinstance(metadata.get(key), list):
        return metadata.integer(key, default, at_least=0)
    found = set(metadata.integers(key)) - {0}
    if len(found) != 1 or min(found) < 1:
        raise metadata.error(key, "must be one positive integer for all layers with experts")
    return found.pop()


def _llama4(file: GgufFile, content: dict[str, Any], num_experts: int) -> dict[str, Any]:
    """Return the layers with experts, and those that attend within chunks: llama.cpp knows the rest."""
    metadata, count = file.metadata, min(content["num_hidden_layers"], MAX_LAYERS)
    step = metadata.integer("llama4.interleave_moe_layer_step", at_least=0)
    found = {
        "moe_layers": list(range(step - 1, count, step)) if step else [],
        "use_qk_norm": num_experts != _MOST_LLAMA4_WITH_NORMS,
        "no_rope_layer_interval": _LLAMA4_EVERY,
    }
    if metadata.get("llama4.attention.sliding_window") != 0:
        return found
    return found | {"layer_types": ["full_attention"] * count, "no_rope_layers": [1] * count}


def _gpt_oss(file: GgufFile, content: dict[str, Any]) -> dict[str, Any]:
    """The border of its YaRN is not rounded, which files do not say; without a pattern each second layer is full."""
    pattern = file.metadata.get("gpt-oss.attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        pattern = [layer % 2 == 0 for layer in range(min(content["num_hidden_layers"], MAX_LAYERS))]
    scaling = content.get("rope_scaling")
    return {
        "sliding_window": file.metadata.integer("gpt-oss.attention.sliding_window"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in pattern],
        **(
            {"rope_scaling": scaling | {"truncate": False}}
            if scaling
            else {"rope_parameters": {"rope_type": "default"}}
        ),
    }


def _of_sigmoid(file: GgufFile, architecture: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of experts as DeepSeek V3 chooses them, and layers without those that predict more tokens."""
    metadata = file.metadata

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    heads = metadata.integer(key("nextn_predict_layers"), 0, at_least=0)
    layers = content["num_hidden_layers"] - heads
    if layers < 1:
        raise metadata.error(key("nextn_predict_layers"), f"{heads} leaves no layer of {content['num_hidden_layers']}")
    return {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": heads,
        "n_group": metadata.integer(key("expert_group_count"), 1),
        "topk_group": metadata.integer(key("expert_group_used_count"), 1),
        "n_shared_experts": metadata.integer(key("expert_shared_count"), at_least=0),
        "first_k_dense_replace": metadata.integer(key("leading_dense_block_count"), 0, at_least=0),
        "routed_scaling_factor": metadata.number(key("expert_weights_scale"), 1.0),
        "norm_topk_prob": metadata.flag(key("expert_weights_norm"), False),
    }
