"""Checkpoints with recurrent layers as llama.cpp's conversion/*.py write them to GGUF files, for `gguf_files`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

ARCHITECTURES = {
    "falcon_h1": "falcon-h1",
    "granitemoehybrid": "granitehybrid",
    "kimi_linear": "kimi-linear",
    "lfm2_moe": "lfm2moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
}
"""GGUF's by transformers' model_type, where they differ."""
NAMES = {*ARCHITECTURES.values(), "lfm2", "nemotron_h", "nemotron_h_moe"}
_SMALL = (".ssm_a", ".ssm_d", ".ssm_norm.weight", ".shortconv.conv.weight")
_ATTENTION = ("attention", "full_attention")
_QWEN = ("qwen35", "qwen35moe", "qwen3next")
_FACTORS = ("mlp_multipliers", "ssm_multipliers")
_HEAD = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head.norm",
}
"""What the converter calls the modules of a head of multi-token prediction in the layer behind the others."""
HEAD_NAMES = {f"{name}.weight": f"nextn.{name.replace('.', '_')}.weight" for name in _HEAD.values()}
"""GGUF's names of these, which gguf knows of some architectures only."""


def architecture_of(config: dict[str, Any]) -> str | None:
    """Return GGUF's name of a model with recurrent layers; None: it has none, or others."""
    kind: str = config["model_type"]
    if kind == "nemotron_h":
        return "nemotron_h_moe" if "moe" in config["layers_block_type"] else "nemotron_h"
    found = ARCHITECTURES.get(kind, kind)
    kinds = config.get("layer_types") or []
    if found in NAMES and (kind == "falcon_h1" or {"linear_attention", "conv"} & set(kinds)):
        return found
    return None


def is_small(name: str) -> bool:
    """Return whether a tensor of this name in GGUF is F32 in any case."""
    return name.endswith(_SMALL) or ".ssm_conv1d" in name


def write_metadata(writer: Any, config: dict[str, Any], architecture: str) -> None:
    """Add what such a model has beside others."""
    kinds = config.get("layer_types") or config.get("layers_block_type") or []
    heads = [config["num_key_value_heads"] if kind in _ATTENTION else 0 for kind in kinds]

    def again(name: str, value: Any) -> None:
        writer.kv_data[0].pop(f"{architecture}.{name}", None)
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{name}", value)
        else:
            writer.add_uint32(f"{architecture}.{name}", value)

    eps = config.get("norm_eps") or config.get("layer_norm_epsilon")
    if eps:
        writer.kv_data[0].pop(f"{architecture}.attention.layer_norm_epsilon")
        writer.add_layer_norm_rms_eps(eps)
    if architecture in ("lfm2", "lfm2moe"):
        again("attention.head_count_kv", heads)
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if architecture == "lfm2":
        size = int(2 * config["intermediate_size"] / 3)
        again("feed_forward_length", -(-size // config["block_multiple_of"]) * config["block_multiple_of"])
    if architecture in _QWEN:
        if config.get("mtp_num_hidden_layers"):
            again("block_count", config["num_hidden_layers"] + 1)
            writer.add_nextn_predict_layers(1)
            kinds = [*kinds, "full_attention"]
        inner = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        _ssm(writer, config["linear_conv_kernel_dim"], inner, config["linear_key_head_dim"],
             config["linear_num_value_heads"], config["linear_num_key_heads"])  # fmt: skip
        if architecture == "qwen35":
            writer.add_array("qwen35.attention.recurrent_layers", [kind == "linear_attention" for kind in kinds])
        else:
            writer.add_uint32(f"{architecture}.full_attention_interval", 4)
    if architecture in ("granitehybrid", "falcon-h1"):
        inner = config["mamba_n_heads"] * config["mamba_d_head"]
        _ssm(writer, config["mamba_d_conv"], inner, config["mamba_d_state"], config["mamba_n_heads"],
             config["mamba_n_groups"])  # fmt: skip
    if architecture == "granitehybrid":
        again("attention.head_count_kv", heads)
        writer.add_rope_scaling_finetuned(False)
    if architecture.startswith("nemotron"):
        wide = "moe_intermediate_size" if architecture.endswith("moe") else "intermediate_size"
        again("attention.head_count_kv", heads)
        again("rope.dimension_count", config["hidden_size"] // config["num_attention_heads"])  # it has none
        again("feed_forward_length", [config[wide] if kind in ("moe", "mlp") else 0 for kind in kinds])
        inner = config["mamba_num_heads"] * config["mamba_head_dim"]
        _ssm(writer, config["conv_kernel"], inner, config["ssm_state_size"], config["mamba_num_heads"],
             config["n_groups"])  # fmt: skip
    if architecture == "kimi-linear":
        again("attention.head_count_kv", [min(1, each) for each in heads])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_kda_head_dim(config["linear_head_dim"])
    _write_experts(writer, config, architecture)


def _ssm(writer: Any, taps: int, inner: int, state: int, heads: int, groups: int) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)


def _write_experts(writer: Any, config: dict[str, Any], architecture: str) -> None:
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((config[name] for name in counts if config.get(name)), 0)
    if not count or architecture in ("falcon-h1", "lfm2", "nemotron_h", "qwen35"):
        return
    chosen = config.get("num_experts_per_tok") or config["num_experts_per_token"]
    writer.add_expert_count(count)
    writer.add_expert_used_count(chosen)
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    for name in shared:
        if config.get(name):
            writer.add_expert_shared_feed_forward_length(config[name])
    if "num_dense_layers" in config:
        writer.add_leading_dense_block_count(config["num_dense_layers"])
    if architecture in ("nemotron_h_moe", "kimi-linear"):
        writer.add_expert_shared_count(config.get("n_shared_experts") or config["num_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(True)
    if architecture == "nemotron_h_moe":
        writer.add_expert_group_count(config["n_group"])
    if architecture == "kimi-linear":
        writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))


def in_layers(name: str, config: dict[str, Any]) -> str:
    """Return the name of a tensor, that of a head as one of a layer behind the others."""
    layer, (module, _, kind) = f"model.layers.{config.get('num_hidden_layers')}", name.rpartition(".")
    if module in _HEAD:
        return f"{layer}.{_HEAD[module]}.{kind}"
    return f"{layer}.{name.removeprefix('mtp.layers.0.')}" if name.startswith("mtp.layers.0.") else name


def name_of(name: str, architecture: str) -> str:
    """Return the name that the converter looks up for a tensor of transformers."""
    if ".experts." in name and architecture in ("lfm2moe", "nemotron_h_moe"):
        layer, module = name.split(".")[2], name.partition(".experts.")[2]
        place = f"layers.{layer}.feed_forward" if architecture == "lfm2moe" else f"model.layers.{layer}.mlp"
        return f"{place}.experts.{module}"
    if architecture.startswith("nemotron"):
        name = name.replace("model.", "backbone.", 1)
    if name.endswith(".dt_bias"):
        name = f"{name.removesuffix('.dt_bias')}.dt_proj.bias"
    elif name.endswith(".expert_bias"):
        name = f"{name}.bias"
    elif name.endswith((".A_log", ".D", ".pre_ff_layernorm.weight")):
        name = f"{name}.none"
    return name


def converted(name: str, values: Floats, config: dict[str, Any], architecture: str) -> Iterator[tuple[str, Floats]]:
    """Yield a tensor as it is in files, under the name that is looked up: of some two are made."""
    if ".shared_mlp." in name:
        yield from _of_mlp(name, values)
        return
    if name.endswith(".A_log"):
        values = -np.exp(values)
    if architecture in _QWEN:
        if name.endswith("in_proj_qkvz.weight"):
            qkv, z = _by_part(values, config)
            yield name.replace("in_proj_qkvz", "in_proj_qkv"), qkv
            yield name.replace("in_proj_qkvz", "in_proj_z"), z
            return
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            values = values + np.float32(1)
        values = values.squeeze(1) if "conv1d" in name else values
        if architecture != "qwen3next":
            values = _tiled(name, values, config)
    elif name.endswith((".D", ".A_log")) and architecture != "kimi-linear":
        values = values.reshape(-1, 1)
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        values = values.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    elif "conv1d" in name and values.ndim == 3:
        values = values[None] if architecture == "kimi-linear" else values.squeeze(1)
        values = values.transpose(0, 1, 2, 3) if values.ndim == 4 else values
    elif name.endswith("conv.conv.weight"):
        values = values.squeeze(1)
    if architecture == "falcon-h1":
        values = _multiplied(name, values, config)
    yield name, np.ascontiguousarray(values)


def _of_mlp(name: str, values: Floats) -> Iterator[tuple[str, Floats]]:
    """Yield the MLP of a Granite without experts, gate and up by themselves."""
    layer = name.partition("shared_mlp")[0]
    if name.endswith("output_linear.weight"):
        yield f"{layer}mlp.down_proj.weight", values
        return
    for part, rows in zip(("gate", "up"), np.split(values, 2), strict=True):
        yield f"{layer}mlp.{part}_proj.weight", rows


def _by_part(values: Floats, config: dict[str, Any]) -> tuple[Floats, Floats]:
    """Return rows that lie by key head as those of queries, keys and values, and those of the gate."""
    heads, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    of_values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    rows = values.reshape(heads, -1, values.shape[-1])
    q, k, v, z = np.split(rows, (key, 2 * key, 2 * key + of_values), axis=1)
    flat = [np.ascontiguousarray(each).reshape(-1, values.shape[-1]) for each in (q, k, v, z)]
    return np.concatenate(flat[:3]), flat[3]


def _tiled(name: str, values: Floats, config: dict[str, Any]) -> Floats:
    """Return value heads in tiled order: those of the first of each key head come first."""
    heads, groups = config["linear_num_value_heads"], config["linear_num_key_heads"]
    order = np.arange(heads).reshape(groups, -1).T.flatten()

    def put(rows: Floats) -> Floats:
        return rows.reshape(heads, -1, *rows.shape[1:])[order].reshape(rows.shape)

    if "in_proj_qkv" in name or "conv1d" in name:
        first = 2 * groups * config["linear_key_head_dim"]
        return np.concatenate([values[:first], put(values[first:])])
    if any(part in name for part in ("in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias")):
        return put(values)
    return put(values.T).T if "linear_attn.out_proj" in name else values


def _multiplied(name: str, values: Floats, config: dict[str, Any]) -> Floats:
    """Return weights and biases times the factors of Falcon-H1, as the converter has them."""
    gate, down = config["mlp_multipliers"]
    into = config["attention_in_multiplier"]
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config["key_multiplier"] * into,
        "q_proj": into,
        "v_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    if name.endswith("mamba.in_proj.weight"):
        inner = config["mamba_n_heads"] * config["mamba_d_head"]
        of_state = config["mamba_n_groups"] * config["mamba_d_state"]
        counts = (inner, inner, of_state, of_state, config["mamba_n_heads"])
        columns = np.repeat(np.array(config["ssm_multipliers"], np.float32), counts)
        return values * columns[:, None] * np.float32(config["ssm_in_multiplier"])
    found = next((factor for part, factor in factors.items() if f".{part}." in f".{name}"), 1.0)
    return values * np.float32(found)
