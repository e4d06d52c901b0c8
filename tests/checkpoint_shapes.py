"""What sets the tiny model of each family apart: fields of its config in transformers."""

from __future__ import annotations

from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}

WINDOW = 24
"""Smaller than the sequences of most tests."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW, "head_dim": 12},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 12, "tie_word_embeddings": True},
    "gemma2": {
        "initializer_range": 0.15,
        "num_hidden_layers": 4,
        "head_dim": 12,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 10,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 12.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "initializer_range": 0.15,
        "num_hidden_layers": 4,
        "head_dim": 12,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 100,
        "tie_word_embeddings": True,
    },
    "phi3": {"hidden_size": 64, "partial_rotary_factor": 0.75, "sliding_window": 40},
    "granite": {
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.5,
    },
}
"""What each family's tiny model has beside or over `SHAPE`, by transformers' model_type: all that sets it apart."""

YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 16.0, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 5000.0}
SANDWICHED = {"initializer_range": 0.15, "num_hidden_layers": 4, "sliding_window": WINDOW}

NEWER: dict[str, dict[str, Any]] = {
    "apertus": {"qk_norm": True},
    "cohere2": {**SANDWICHED, "logit_scale": 0.25, "tie_word_embeddings": True, "layer_norm_eps": 1e-4},
    "ernie4_5": {"head_dim": 12, "use_bias": True, "tie_word_embeddings": True},
    "exaone4": {**SANDWICHED, "head_dim": 12, "sliding_window_pattern": 4},
    "gemma4_text": {
        **SANDWICHED,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "head_dim": 12,
        "global_head_dim": 20,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "attention_bias": True,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 140,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "falcon": {"bias": True, "layer_norm_epsilon": 1e-4, "initializer_range": 0.2},
    "glm4": {"head_dim": 12, "attention_bias": True, "initializer_range": 0.15},
    "gpt2": {
        "n_positions": 512,
        "n_embd": 40,
        "n_head": 4,
        "n_layer": 2,
        "n_inner": 72,
        "layer_norm_epsilon": 1e-4,
        "tie_word_embeddings": True,
    },
    "gpt_neox": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.4}, "layer_norm_eps": 1e-4},
    "granite_swa": {
        **SANDWICHED,
        "head_dim": 12,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.5,
        "layer_rope_theta": [300.0, 0, 5000.0, 300.0],
    },
    "granitemoehybrid": {
        "layer_types": ["attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 72,
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "mamba_d_head": 10,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.5,
    },
    "hunyuan_v1_dense": {
        "head_dim": 12,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 5000.0, "alpha": 50.0, "factor": 1.0},
    },
    "llama4_text": {
        "num_hidden_layers": 4,
        "head_dim": 12,
        "intermediate_size_mlp": 72,
        "moe_layers": [],
        "attention_chunk_size": WINDOW,
        "floor_scale": 16,
        "attn_scale": 0.4,
        "attention_bias": True,
    },
    "ministral3": {
        "head_dim": 12,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
    },
    "nemotron": {
        "attention_bias": True,
        "mlp_bias": True,
        "norm_eps": 1e-4,
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.6},
    },
    "olmo2": {"initializer_range": 0.15},
    "olmo3": {
        **SANDWICHED,
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "opt": {"ffn_dim": 72, "tie_word_embeddings": True, "pad_token_id": 1},
    "phi": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.4}, "layer_norm_eps": 1e-4},
    "qwen3_5_text": {
        "head_dim": 20,
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.4, "mrope_section": [2, 1, 1]},
        "attention_bias": True,
    },
    "seed_oss": {"head_dim": 12, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    "starcoder2": {"sliding_window": WINDOW, "norm_epsilon": 1e-4, "use_bias": True, "tie_word_embeddings": True},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "tie_word_embeddings": True},
}
"""The same for families that have parts which those before lack."""

HOSTED: dict[str, dict[str, Any]] = {
    "afmoe": {
        **SANDWICHED,
        "head_dim": 12,
        "global_attn_every_n_layers": 2,
        "num_dense_layers": 1,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
    },
    "codegen": {"rotary_dim": 6, "n_positions": 512, "n_embd": 40, "n_head": 4, "n_layer": 2, "n_inner": 72},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": WINDOW,
        "tie_word_embeddings": True,
    },
    "gptj": {"rotary_dim": 6, "n_positions": 512, "n_embd": 40, "n_head": 4, "n_layer": 2, "n_inner": 72},
}
"""The same for families that Cadenza has no code of its own for: they run through transformers."""
