"""What sets the tiny model of each family with experts apart, as in `tests.checkpoint_shapes`."""

from __future__ import annotations

from typing import Any

from tests.checkpoint_shapes import SANDWICHED, WINDOW, YARN

_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "n_shared_experts": 1}

_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_shared_experts": 1,
}
"""Sizes that differ from each other; those of the cache's rows are no whole vectors."""
_DEEP_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}

MIXTURES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **_LATENT,
        "q_lora_rank": None,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "rope_parameters": _DEEP_YARN,
    },
    "deepseek_v3": {
        **_LATENT,
        **_GROUPED,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "rope_parameters": _DEEP_YARN,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "moe_layer_end_index": 2,
        "tie_word_embeddings": True,
    },
    "exaone_moe": {
        **SANDWICHED,
        **_EXPERTS,
        "num_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "head_dim": 12,
        "sliding_window_pattern": 4,
    },
    "glm4_moe": {
        **_EXPERTS,
        **_GROUPED,
        "head_dim": 12,
        "use_qk_norm": True,
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
    },
    "glm4_moe_lite": {**_LATENT, **_GROUPED, "num_hidden_layers": 3, "tie_word_embeddings": True},
    "gpt_oss": {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "granitemoe": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.5,
    },
    "granitemoe_swa": {
        **SANDWICHED,
        "head_dim": 12,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "layer_rope_theta": [300.0, 0, 5000.0, 300.0],
    },
    "granitemoeshared": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "attention_multiplier": 0.2,
    },
    "hunyuan_v1_moe": {"head_dim": 12, "num_experts": 5, "moe_topk": 2},
    "mistral4": {
        **_LATENT,
        **_GROUPED,
        "rope_parameters": {**_DEEP_YARN, "llama_4_scaling_beta": 0.3},
    },
    "minimax_m2": {"head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 8},
    "mixtral": {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "phimoe": {
        "num_local_experts": 5,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.4,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 5000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4],
            "long_factor": [2.0] * 5,
            "short_mscale": 1.2,
            "long_mscale": 1.5,
            "original_max_position_embeddings": 512,
        },
    },
    "qwen2_moe": {
        **_EXPERTS,
        "num_experts": 6,
        "shared_expert_intermediate_size": 40,
        "num_hidden_layers": 4,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {**_EXPERTS, "head_dim": 12, "num_experts": 8, "norm_topk_prob": True},
    "qwen3_next": {
        **_EXPERTS,
        "head_dim": 20,
        "layer_types": ["full_attention"] * 2,
        "partial_rotary_factor": 0.4,
        "num_experts": 6,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
}
"""By transformers' model_type."""
