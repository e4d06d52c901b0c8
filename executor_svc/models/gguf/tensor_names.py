"""GGUF's names of the tensors that transformers' checkpoints have, and how their numbers differ.

The source is llama.cpp's convert_hf_to_gguf.py. Some of its architectures, such as `llama`, rotate neighbouring
elements of a head where transformers rotates halves: rows of query and key projections change places. Norms of Gemma,
Nemotron and Qwen3.5 have 1 added.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from executor_svc.models.gguf.recurrent_names import FINAL_NORMS, RECURRENT_NAMES, RECURRENT_TENSORS, SHIFTED_NORMS
from executor_svc.models.specs.file_form import FINAL_NORM, HEAD, POSITIONS, TABLE

_ENDS = {
    TABLE: "token_embd",
    POSITIONS: "position_embd",
    FINAL_NORM: "output_norm",
    HEAD: "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_SHARED = ("mlp.shared_expert", "mlp.shared_experts", "mlp.shared_mlp", "shared_mlp", "feed_forward.shared_expert")
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "feed_forward.router": "ffn_gate_inp",
    "router.proj": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "shared_mlp.input_linear": "ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
    **{f"{module}.{name}_proj": f"ffn_{name}_shexp" for module in _SHARED for name in ("gate", "up", "down")},
    **{f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
_EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
"""One tensor has the matrices of all experts."""
_FUSED = {"ffn_gate_exps": 0, "ffn_up_exps": 1}
"""Which half of the rows of `ffn_gate_up_exps` each is, where files have that."""
_TENSORS = RECURRENT_TENSORS | {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
"""Tensors of a layer that are no weights or biases of modules."""
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:.+\.)?experts\.(\d+)\.(\w+)\.(\w+)")
_CHOICE_BIAS = re.compile(r"model\.layers\.(\d+)\..+\.e_score_correction_bias")
_GEMMA = ("gemma2", "gemma3")
_NORMS_AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_GEMMA_NORMS = _NORMS_AFTER | {"pre_feedforward_layernorm": "ffn_norm"}
_INPUTS = {
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_BESIDE = {
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
_SHIFTED = (*_GEMMA, *SHIFTED_NORMS, "nemotron")
_SCALAR = "layer_scalar"
_NEOX_MLP = {"mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down"}
_OTHER_NAMES: dict[str, dict[str, str]] = RECURRENT_NAMES | {
    **dict.fromkeys(_GEMMA, _GEMMA_NORMS),
    **dict.fromkeys(("exaone4", "olmo2"), _NORMS_AFTER),
    "gemma4": _GEMMA_NORMS | _INPUTS | _BESIDE,
    "apertus": {"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
    "glm4moe": {"post_attention_layernorm": "post_attention_norm"},
    "falcon": {
        "ln_attn": "attn_norm_2",
        "ln_mlp": "attn_norm",
        "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
        **_NEOX_MLP,
    },
    "gpt2": {
        "ln_1": "attn_norm",
        "ln_2": "ffn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    },
    "gptneox": {"attention.query_key_value": "attn_qkv", "attention.dense": "attn_output", **_NEOX_MLP},
    "phi2": {"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"},
    "glm4": {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    "hunyuan-dense": {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
    "starcoder2": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    "hunyuan-moe": {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
}
"""By architecture: what is called otherwise than in `_LAYER`, or is not there."""
_NEIGHBOURS_ROTATED = ("granite", "granite_swa", "granitehybrid", "granitemoe", "llama", "mistral3", "smollm3")
"""Those whose checkpoints rotate halves; where checkpoints rotate neighbours themselves, files have their order."""
_ROTATED = ("self_attn.q_proj.weight", "self_attn.q_proj.bias", "self_attn.k_proj.weight", "self_attn.k_proj.bias")


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names and numbers of one architecture of GGUF."""

    architecture: str
    head_size: int

    def stored(self, name: str) -> str:
        """Return GGUF's name of a tensor that transformers calls `name`; an unknown one stays as it is."""
        if (expert := _EXPERT.fullmatch(name)) and (known := _EXPERTS.get(expert[3])):
            return f"blk.{expert[1]}.{known}.{expert[4]}"
        if bias := _CHOICE_BIAS.fullmatch(name):
            return f"blk.{bias[1]}.exp_probs_b.bias"
        if name.endswith(".self_attn.sinks"):
            return f"blk.{name.split('.')[2]}.attn_sinks.weight"
        part, _, kind = name.rpartition(".")
        if part == FINAL_NORM and self.architecture in FINAL_NORMS:
            return f"{FINAL_NORMS[self.architecture]}.{kind}"
        if part in _ENDS:
            return f"{_ENDS[part]}.{kind}"
        words = name.split(".", 3)
        if len(words) == 4 and words[3] in _TENSORS:
            return f"blk.{words[2]}.{_TENSORS[words[3]]}"
        words = part.split(".", 3)
        if kind == _SCALAR and len(words) == 3:
            return f"blk.{words[2]}.layer_output_scale.weight"
        if kind == "sinks":
            return f"blk.{words[2]}.attn_sinks.weight"
        layer_names = _LAYER | _OTHER_NAMES.get(self.architecture, {})
        if len(words) < 4 or words[3] not in layer_names:
            return name
        return f"blk.{words[2]}.{layer_names[words[3]]}.{kind}"

    def original(self, stored: str) -> str:
        """Return transformers' name of a layer's tensor, or GGUF's in its layer; others stay as they are."""
        words = stored.split(".", 3)
        names = {name: own for own, name in (_LAYER | _OTHER_NAMES.get(self.architecture, {})).items()}
        if len(words) < 4 or words[0] != "blk":
            return stored
        return f"model.layers.{words[1]}.{names.get(words[2], words[2])}.{words[3]}"

    @staticmethod
    def expert(name: str) -> int | None:
        """Return the expert whose matrix in the stored tensor is meant; None: the tensor is meant as it is."""
        found = _EXPERT.fullmatch(name)
        return None if found is None else int(found[2])

    @staticmethod
    def fused(stored: str) -> tuple[str, int] | None:
        """Return the tensor that may have the matrices of `stored` too, and which half of its rows they are."""
        before, module, kind = stored.rpartition(".")[0].rpartition(".")[0], *stored.split(".")[-2:]
        return (f"{before}.ffn_gate_up_exps.{kind}", _FUSED[module]) if module in _FUSED else None

    def head_rows(self, name: str) -> int | None:
        """Return the number of rows that change places among themselves, or None: rows are in transformers' order."""
        return self.head_size if self.architecture in _NEIGHBOURS_ROTATED and name.endswith(_ROTATED) else None

    def offset(self, name: str) -> float:
        """Return what the file has added to the numbers of a tensor."""
        if name.endswith("linear_attn.norm.weight"):
            return 0.0
        return 1.0 if self.architecture in _SHIFTED and name.endswith("norm.weight") else 0.0


def halves(rows: Tensor, head_rows: int) -> Tensor:
    """Return rows [heads * head_rows, ...] in transformers' order: neighbours become a half head apart."""
    return rows.reshape(-1, head_rows // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
