"""GGUF's names of what layers with recurrences have, for `gguf.tensor_names`.

The source is llama.cpp's gguf-py/gguf/tensor_mapping.py and constants.py.
"""

from __future__ import annotations

_MAMBA = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out"}
_DELTA = {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "post_attention_layernorm": "post_attention_norm",
    **{name: f"nextn.{name}" for name in ("eh_proj", "hnorm", "enorm")},
    "shared_head.norm": "nextn.shared_head_norm",
}
"""With those of a head of multi-token prediction."""
_LFM = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    **{f"conv.{name}": f"shortconv.{name}" for name in ("in_proj", "conv", "out_proj")},
}
_NEMOTRON = {
    "norm": "attn_norm",
    **{f"mixer.{name}_proj": f"attn_{name}" for name in ("q", "k", "v")},
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    **{f"mixer.{name}": stored for name, stored in _MAMBA.items()},
}
_OF_MAMBA = {f"mamba.{name}": stored for name, stored in _MAMBA.items()}
_KIMI = {
    "self_attn.b_proj": "ssm_beta",
    **{f"self_attn.{name}_proj": f"ssm_{name}" for name in ("f_a", "f_b", "g_a", "g_b")},
    **{f"self_attn.{name}_conv1d": f"ssm_conv1d_{name}" for name in ("q", "k", "v")},
    "self_attn.o_norm": "ssm_norm",
    **{f"block_sparse_moe.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
}
RECURRENT_NAMES: dict[str, dict[str, str]] = {
    "falcon-h1": _OF_MAMBA,
    "granitehybrid": _OF_MAMBA,
    "kimi-linear": _KIMI,
    "lfm2": _LFM,
    "lfm2moe": _LFM,
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "qwen35": _DELTA,
    "qwen35moe": _DELTA,
    "qwen3next": _DELTA,
}
"""By architecture: modules of a layer."""
RECURRENT_TENSORS = {
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "pre_ff_layernorm.weight": "ffn_norm",
    **{
        f"{module}.{name}": stored
        for module in ("linear_attn", "mamba", "mixer", "self_attn")
        for name, stored in (("A", "ssm_a"), ("D", "ssm_d"), ("dt_bias", "ssm_dt.bias"))
    },
}
"""Tensors of a layer that are no weights or biases of modules, or not called so: Falcon-H1's norm before the MLP."""
FINAL_NORMS = dict.fromkeys(("lfm2", "lfm2moe"), "token_embd_norm")
"""By architecture: the final norm, where it is called otherwise."""
SHIFTED_NORMS = ("qwen35", "qwen35moe", "qwen3next")
"""Architectures whose files have 1 added to all norms but that within the recurrence."""
