"""GGUF's names and sizes of the families that benchmarks write, as llama.cpp's conversion scripts have them.

The source is `conversion/` in llama.cpp (llama-cpp-python 0.3.36): lfm2.py and qwen.py for the recurrent ones. Needs
numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LLAMA = {**_ATTENTION, **_MLP, "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_LFM2 = {
    **_ATTENTION,
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}
_QWEN35 = {
    **_ATTENTION,
    **_MLP,
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
_WITHOUT_WEIGHT = ("ssm_a", "ssm_dt.bias")


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How GGUF files of a family call it and its tensors."""

    architecture: str
    layers: Mapping[str, str]
    """Of a tensor in a layer by transformers' name of its module."""
    outside: Mapping[str, str] = field(default_factory=lambda: _OUTSIDE)
    neighbours: bool = False
    """Whether elements that are rotated together are neighbours in the file, not halves of a head apart."""

    def tensor_name(self, name: str) -> str:
        """The name of a tensor that transformers calls `name`."""
        part = name.removesuffix(".weight")
        if part in self.outside:
            return f"{self.outside[part]}.weight"
        _, _, layer, rest = part.split(".", 3)
        known = self.layers[rest]
        return f"blk.{layer}.{known}{'' if known in _WITHOUT_WEIGHT else '.weight'}"


FAMILIES = {
    "llama": GgufFamily("llama", _LLAMA, neighbours=True),
    "qwen3": GgufFamily("qwen3", _LLAMA),
    "qwen3_moe": GgufFamily("qwen3moe", {**_LLAMA, **_EXPERTS}),
    "lfm2": GgufFamily("lfm2", _LFM2, {**_OUTSIDE, "model.embedding_norm": "token_embd_norm"}),
    "qwen3_5_text": GgufFamily("qwen35", _QWEN35),
}
"""By model_type of config.json."""


def stored_values(numpy: Any, config: Mapping[str, Any], name: str, values: Any) -> Any:
    """What the file has in the place of a tensor in fp32 that transformers calls `name`."""
    if values.ndim == 3:  # a convolution's weight, [channels, 1, taps]
        values = values[:, 0]
    if config["model_type"] != "qwen3_5_text":
        return values
    if name.endswith(".A_log"):
        return -numpy.exp(values)
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return values + 1
    return values


def write_recurrent_sizes(writer: Any, config: Mapping[str, Any]) -> None:
    """Write what hybrids with recurrent layers have beside the sizes of all; raises ValueError for unlike heads."""
    if config["model_type"] == "lfm2":
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if config["model_type"] != "qwen3_5_text":
        return
    if config["linear_num_key_heads"] != config["linear_num_value_heads"]:
        raise ValueError("linear_num_key_heads and linear_num_value_heads differ: this does not reorder heads")
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def feed_forward_size(config: Mapping[str, Any]) -> int:
    """Width of the MLP: LFM2's is a rounded part of what its config.json says."""
    size = int(config["intermediate_size"])
    if config.get("model_type") == "lfm2" and config["block_auto_adjust_ff_dim"]:
        size, multiple = int(config["block_ffn_dim_multiplier"] * (2 * size // 3)), int(config["block_multiple_of"])
        size = -(-size // multiple) * multiple
    return size


def is_recurrent(config: Mapping[str, Any]) -> list[bool]:
    """Of each layer, whether it has a recurrence in the place of attention."""
    kinds = config.get("layer_types") or ["full_attention"] * int(config["num_hidden_layers"])
    return [kind in ("conv", "linear_attention") for kind in kinds]
