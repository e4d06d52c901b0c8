"""The metadata of a GGUF file of a model with recurrent layers, as the fields of a config.json.

Keys and what stands for absent ones: llama.cpp's src/models/*.cpp and conversion/*.py.
"""

from __future__ import annotations

from typing import Any

from cadenza_common.gguf.file import GgufFile
from executor_svc.models.gguf.latent_content import latent_sizes

KIMI = "kimi-linear"
RECURRENT = {
    "falcon-h1": ("FalconH1ForCausalLM", "falcon_h1"),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
    KIMI: ("KimiLinearForCausalLM", "kimi_linear"),
    "lfm2": ("Lfm2ForCausalLM", "lfm2"),
    "lfm2moe": ("Lfm2MoeForCausalLM", "lfm2_moe"),
    "nemotron_h": ("NemotronHForCausalLM", "nemotron_h"),
    "nemotron_h_moe": ("NemotronHForCausalLM", "nemotron_h"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next"),
}
"""Architecture and model_type of config.json by GGUF's architecture."""
_MOST_LAYERS = 10_000
_INTERVAL = 4


def recurrent_content(file: GgufFile, architecture: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of one family; content: those that all families share. Raises GgufError."""
    name, model_type = RECURRENT[architecture]
    read = _Reader(file, architecture, content["num_hidden_layers"])
    found = {"architectures": [name], "model_type": model_type}
    match architecture:
        case "lfm2" | "lfm2moe":
            return found | _lfm2(read, content)
        case "qwen35" | "qwen35moe" | "qwen3next":
            return found | _qwen(read)
        case "granitehybrid":
            return found | _granite(read, content)
        case "falcon-h1":
            return found | _falcon(read)
        case "kimi-linear":
            return found | _kimi(read)
        case _:
            return found | _nemotron(read, content)


class _Reader:
    """Reads keys of one architecture."""

    def __init__(self, file: GgufFile, architecture: str, num_layers: int) -> None:
        self.file, self._architecture = file, architecture
        self.heads = self.integer("nextn_predict_layers", 0)
        """Layers of a head of multi-token prediction, which follow the others."""
        if self.heads >= num_layers:
            raise file.metadata.error(self.key("nextn_predict_layers"), f"{self.heads} leaves no layer of {num_layers}")
        self.num_layers = num_layers - self.heads

    def key(self, name: str) -> str:
        return f"{self._architecture}.{name}"

    def integer(self, name: str, default: int | None = None) -> int:
        return self.file.metadata.integer(self.key(name), default, at_least=0)

    def has(self, end: str) -> bool:
        """Return whether a layer has a tensor of this name."""
        return any(name.endswith(f".{end}") for name in self.file.tensors)

    def by_layer(self, name: str) -> list[int]:
        """Return the numbers of the layers, which may be given as one for all."""
        metadata, count = self.file.metadata, min(self.num_layers, _MOST_LAYERS)
        if not isinstance(metadata.get(self.key(name)), list):
            return [self.integer(name)] * count
        found = metadata.integers(self.key(name))
        if len(found) < count or min(found, default=-1) < 0:
            raise metadata.error(self.key(name), f"must be numbers of at least 0 for {count} layers")
        return found[:count]

    def largest(self, name: str, default: int) -> int:
        """Return the largest of the layers' numbers, or the one of all."""
        metadata = self.file.metadata
        if not isinstance(metadata.get(self.key(name)), list):
            return metadata.integer(self.key(name), default, at_least=0)
        return max(metadata.integers(self.key(name)), default=0)

    def kinds(self, recurrent: str) -> list[str]:
        """Return the kind of each layer: those that are not recurrent have KV heads."""
        return ["full_attention" if heads else recurrent for heads in self.by_layer("attention.head_count_kv")]

    def experts(self) -> dict[str, Any]:
        """Return the fields of experts; of models without such none."""
        if not self.integer("expert_count", 0):
            return {}
        return {
            "num_experts": self.integer("expert_count"),
            "num_experts_per_tok": self.largest("expert_used_count", 0),
            "moe_intermediate_size": self.largest("expert_feed_forward_length", 0),
        }

    def mamba(self) -> dict[str, Any]:
        """Return the sizes of Mamba-2."""
        heads, inner = self.integer("ssm.time_step_rank"), self.integer("ssm.inner_size")
        return {
            "mamba_n_heads": heads,
            "mamba_d_head": inner // max(1, heads),
            "mamba_n_groups": self.integer("ssm.group_count"),
            "mamba_d_state": self.integer("ssm.state_size"),
            "mamba_d_conv": self.integer("ssm.conv_kernel"),
            "mamba_proj_bias": self.has("ssm_in.bias") or self.has("ssm_out.bias"),
        }


def _lfm2(read: _Reader, content: dict[str, Any]) -> dict[str, Any]:
    window = read.key("attention.sliding_window")
    if read.file.metadata.integer(window, 0, at_least=0):
        raise read.file.metadata.error(window, "windows are not supported here")
    return {
        "layer_types": read.kinds("conv"),
        "conv_L_cache": read.integer("shortconv.l_cache"),
        "conv_bias": any(read.has(f"shortconv.{name}.bias") for name in ("conv", "in_proj", "out_proj")),
        "norm_eps": content["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
        "num_dense_layers": read.integer("leading_dense_block_count", 0),
        "use_expert_bias": read.has("exp_probs_b.bias"),
        "routed_scaling_factor": read.file.metadata.number(read.key("expert_weights_scale"), 1.0) or 1.0,
        **read.experts(),
    }


def _qwen(read: _Reader) -> dict[str, Any]:
    """Return the fields of Qwen's families: value heads lie in another order in Qwen3.5's files."""
    heads, inner = read.integer("ssm.time_step_rank"), read.integer("ssm.inner_size")
    shared = read.integer("expert_shared_feed_forward_length", 0)
    return {
        "num_hidden_layers": read.num_layers,
        "mtp_num_hidden_layers": read.heads,
        "layer_types": _qwen_kinds(read),
        "linear_num_key_heads": read.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": read.integer("ssm.state_size"),
        "linear_value_head_dim": inner // max(1, heads),
        "linear_conv_kernel_dim": read.integer("ssm.conv_kernel"),
        "has_tiled_value_heads": not read.has("ssm_ba.weight"),
        "has_split_projections": not read.has("ssm_in.weight"),
        **({"shared_expert_intermediate_size": shared} if shared else {}),
        **read.experts(),
    }


def _qwen_kinds(read: _Reader) -> list[str]:
    key, count = read.key("attention.recurrent_layers"), min(read.num_layers, _MOST_LAYERS)
    flags = read.file.metadata.get(key)
    if flags is None:
        interval = max(1, read.integer("full_attention_interval", _INTERVAL))
        flags = [(layer + 1) % interval != 0 for layer in range(count)]
    if not isinstance(flags, list) or len(flags) < count:
        raise read.file.metadata.error(key, f"must be a flag for each of {count} layers")
    return ["linear_attention" if flag else "full_attention" for flag in flags[:count]]


def _granite(read: _Reader, content: dict[str, Any]) -> dict[str, Any]:
    shared = read.integer("expert_shared_feed_forward_length", 0)
    experts, mamba = read.experts(), read.mamba()
    rotated = read.file.metadata.flag(read.key("rope.scaling.finetuned"), True)
    return {
        **mamba,
        "mamba_inner": read.integer("ssm.inner_size"),
        "layer_types": read.kinds("linear_attention"),
        "position_embedding_type": "rope" if rotated else None,
        "has_split_shared_mlp": True,
        "shared_intermediate_size": shared if experts or shared else content["intermediate_size"],
        "num_local_experts": experts["num_experts"] if experts else 0,
        **({"num_experts_per_tok": experts["num_experts_per_tok"]} if experts else {}),
    }


def _falcon(read: _Reader) -> dict[str, Any]:
    """Return the fields of Falcon-H1: its factors are in the weights of files."""
    return {
        **read.mamba(),
        "has_folded_factors": True,
        "mamba_d_ssm": read.integer("ssm.inner_size"),
        "mamba_rms_norm": read.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": read.has("ssm_out.bias"),
    }


def _kimi(read: _Reader) -> dict[str, Any]:
    return {
        **latent_sizes(read.file, KIMI),
        "layer_types": read.kinds("linear_attention"),
        "linear_num_heads": read.integer("attention.head_count"),
        "linear_head_dim": read.integer("kda.head_dim"),
        "linear_conv_kernel_dim": read.integer("ssm.conv_kernel"),
        "first_k_dense_replace": read.integer("leading_dense_block_count", 0),
        "n_shared_experts": read.integer("expert_shared_count", 0),
        "routed_scaling_factor": read.file.metadata.number(read.key("expert_weights_scale"), 1.0) or 1.0,
        "norm_topk_prob": True,
        **read.experts(),
    }


def _nemotron(read: _Reader, content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Nemotron-H: layers without KV heads and MLP are recurrent."""
    experts, mamba = read.experts(), read.mamba()
    wide = "moe" if experts else "mlp"
    sizes = zip(read.by_layer("attention.head_count_kv"), read.by_layer("feed_forward_length"), strict=True)
    factor = read.file.metadata.number(read.key("expert_weights_scale"), 1.0)
    return {
        "layers_block_type": [
            "full_attention" if heads else wide if inner else "linear_attention" for heads, inner in sizes
        ],
        "num_hidden_layers": read.num_layers,
        "num_nextn_predict_layers": read.heads,
        "layer_norm_epsilon": content["rms_norm_eps"],
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_bias": mamba["mamba_proj_bias"],
        "n_group": max(1, read.integer("expert_group_count", 1)),
        "n_shared_experts": read.integer("expert_shared_count", 0),
        "moe_shared_expert_intermediate_size": read.integer("expert_shared_feed_forward_length", 0),
        "moe_latent_size": read.integer("moe_latent_size", 0) or None,
        "norm_topk_prob": bool(read.file.metadata.get(read.key("expert_weights_norm"))),
        "routed_scaling_factor": factor or 1.0,
        **experts,
    }
