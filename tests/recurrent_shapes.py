"""What tiny models of families with recurrent layers have beside or over the sizes of `tests.checkpoints`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_PLAIN = {"rope_type": "default", "rope_theta": 5000.0}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_DELTA = {
    "initializer_range": 0.2,
    "num_hidden_layers": 4,
    "head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.4, "mrope_section": [2, 1, 1]},
}
"""Three recurrent layers, one of attention; sizes that differ, and are no whole vectors."""
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 10,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_GRANITE = {
    **_MAMBA,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 40,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
}
_NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 16,
    "head_dim": 12,
    "time_step_min": 1e-12,  # transformers' code clamps there, and only in its chunked form
    "layer_norm_epsilon": 1e-5,
}

RECURRENT: dict[str, dict[str, Any]] = {
    "falcon_h1": {
        **_MAMBA,
        "mamba_d_ssm": 80,
        "projectors_bias": True,
        "mamba_rms_norm": False,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.4,
        "key_multiplier": 0.6,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.7,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.8,
        "ssm_multipliers": [0.7, 0.5, 0.9, 1.1, 0.6],
        "mlp_multipliers": [0.8, 0.6],
    },
    "granite_h": {**_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2},
    "kimi_linear": {
        **_EXPERTS,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "linear_head_dim": 20,
        "linear_num_heads": 3,
        "num_local_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "lfm2": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_multiple_of": 8,
        "conv_bias": True,
        "tie_word_embeddings": True,
    },
    "lfm2_moe": {
        **_EXPERTS,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_experts": 6,
        "num_dense_layers": 1,
        "conv_L_cache": 4,
        "routed_scaling_factor": 1.5,
    },
    "lfm3": {
        "num_hidden_layers": 5,
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv", "sliding_attention"],
        "head_dim": 12,
        "sliding_window": 24,
        "conv_bias": True,
        "attention_bias": True,
        "initializer_range": 0.15,
    },
    "nemotron_h": {
        **_NEMOTRON,
        **_EXPERTS,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "moe_shared_expert_intermediate_size": 32,
    },
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 40},
    "qwen3_5_delta": {**_DELTA, "attention_bias": True},
    "qwen3_next_delta": {
        **_DELTA,
        **_EXPERTS,
        "rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.4},
        "num_experts": 6,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
}

MODEL_TYPES = {
    "granite_h": "granitemoehybrid",
    "qwen3_5_delta": "qwen3_5_text",
    "qwen3_next_delta": "qwen3_next",
}
"""Of transformers, where a family has layers of attention alone under that name."""


def randomize(name: str, parameter: Tensor) -> bool:
    """Fill what transformers initializes to constants, or to decays that leave nothing to remember; whether it did."""
    if name.endswith("A_log"):
        parameter.uniform_(-2.5, 0.5)
    elif name.endswith("dt_bias"):
        parameter.uniform_(-3.0, 0.5)
    elif name.endswith((".D", "conv1d.weight", "conv.conv.weight")):
        parameter.normal_(0, 0.6)
    else:
        return False
    return True
