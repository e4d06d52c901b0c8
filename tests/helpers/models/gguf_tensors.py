"""The tensors of a checkpoint of transformers as GGUF has them, by its names; needs gguf."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

from tests.helpers.models import gguf_recurrent
from tests.helpers.models.gguf_blocks import Floats

_SPLIT = ("granitehybrid", "granitemoe", "llama4")
"""Those of which gate and up of all experts are tensors of their own."""
_EXPERT = re.compile(r"(\.experts)\.(\d+)\.(\w+\.weight)$")


def gguf_name(name: str, architecture: str) -> str:
    """Return GGUF's name of a tensor of transformers, from gguf's own table of names."""
    if name.endswith(".e_score_correction_bias"):
        return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    name = gguf_recurrent.name_of(name, architecture) if architecture in gguf_recurrent.NAMES else name
    part, _, kind = (f"{name}.weight" if name.endswith("layer_scalar") else _EXPERT.sub(r"\1.\3", name)).rpartition(".")
    if kind == "sinks":
        return f"blk.{name.split('.')[2]}.attn_sinks.weight"
    others = {
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
        "shared_mlp.input_linear.weight": "ffn_up_shexp.weight",
        "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
        **gguf_recurrent.HEAD_NAMES,
    }
    for end, other in others.items():
        if name.endswith(f".{end}"):
            return f"blk.{name.split('.')[2]}.{other}"
    found = _names(architecture).get_name(part)
    if found is not None and kind == "none":
        return found
    assert found is not None, name
    return f"{found}.{kind}"


CONV = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""GPT-2's weights that are stored transposed."""
POSITIONS = "wpe.weight"


@cache
def _names(architecture: str) -> gguf.TensorNameMap:
    """A table of thousands of names: 40 ms of a processor."""
    architecture = "granite" if architecture == "granite_swa" else architecture  # which this gguf does not know
    (found,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(found, 100)


_NEIGHBOURS = ("llama", "granite", "granite_swa", "granitemoe", "mistral3", "smollm3")


def neighbours(values: Floats, heads: int) -> Floats:
    """Return rows of a query or key projection so that those a half head apart become neighbours."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def stored_tensors(folder: Path) -> Iterator[tuple[str, Floats]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file is no dict
            yield name, file.get_tensor(name).float().numpy()


def tensors_of(folder: Path, config: dict[str, Any], architecture: str) -> Iterator[tuple[str, Floats]]:
    """Yield all tensors as GGUF has them."""
    experts: dict[str, list[tuple[int, Floats]]] = {}
    for stored, values in stored_tensors(folder):
        name = gguf_recurrent.in_layers(stored, config)
        if ".act_fn." in name:
            continue
        if architecture == "gpt-oss" and (".experts." in name or name.endswith("sinks")):
            yield from _of_gpt_oss(name, values)
            continue
        if ".kv_b_proj." in name and config["model_type"] != "deepseek_v2":  # that one as older files have it
            prefix = gguf_name(name, architecture).removesuffix("attn_kv_b.weight")
            keys, value = by_kind(values, config)
            yield f"{prefix}attn_k_b.weight", keys
            yield f"{prefix}attn_v_b.weight", value
            continue
        if architecture in gguf_recurrent.NAMES and (found := _of_recurrent(name, values, config, architecture)):
            yield from found
            continue
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            name = f"{name}.weight"
        if expert := _EXPERT.search(name):
            experts.setdefault(gguf_name(name, architecture), []).append((int(expert[2]), values))
            continue
        if values.ndim == 3:
            yield from _stacked(name, values.swapaxes(1, 2) if architecture == "llama4" else values, architecture)
            continue
        if name.endswith("shared_mlp.input_linear.weight") and architecture in _SPLIT:
            for part, half in zip(("gate", "up"), np.split(values, 2), strict=True):
                yield f"blk.{name.split('.')[2]}.ffn_{part}_shexp.weight", half
            continue
        if name.endswith(("e_score_correction_bias", "shared_expert_gate.weight")):
            values = values.flatten()
        if architecture in _NEIGHBOURS and (".q_proj" in name or ".q_norm" in name):
            values = neighbours(values, config["num_attention_heads"])
        elif architecture in _NEIGHBOURS and ".k_proj" in name:
            values = neighbours(values, config["num_key_value_heads"])
        elif architecture == "gpt2" and name.endswith(CONV):
            values = np.ascontiguousarray(values.T)
        elif "query_key_value" in name:
            values = _by_part(values, config)
        elif architecture in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        yield gguf_name(name, architecture), values
    for name, matrices in experts.items():
        yield name, np.stack([values for _, values in sorted(matrices, key=lambda each: each[0])])


def _of_recurrent(name: str, values: Floats, config: dict[str, Any], architecture: str) -> list[tuple[str, Floats]]:
    """Return what is made of a tensor that is of no expert."""
    others = (".experts.", ".block_sparse_moe.", ".kv_b_proj.", "correction_bias")
    if any(part in name for part in others) or (".shared_mlp." in name and config.get("num_local_experts")):
        return []
    made = gguf_recurrent.converted(name, values, config, architecture)
    return [(gguf_name(each, architecture), rows) for each, rows in made]


def stack_names(name: str) -> tuple[str, ...]:
    """Return what GGUF calls the tensor of all experts, and its halves, if it has gate and up."""
    into = name.removesuffix(".weight").endswith(("gate_up_proj", "input_linear"))
    return ("ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps") if into else ("ffn_down_exps",)


def _stacked(name: str, rows: Floats, architecture: str) -> Iterator[tuple[str, Floats]]:
    """Yield the tensors of all experts [E, rows, columns]."""
    whole, *halves = stack_names(name)
    parts = {whole: rows}
    if halves and architecture in _SPLIT:
        parts = dict(zip(halves, np.split(rows, 2, axis=1), strict=True))
    for part, each in parts.items():
        yield f"blk.{name.split('.')[2]}.{part}.weight", np.ascontiguousarray(each)


def _of_gpt_oss(name: str, values: Floats) -> Iterator[tuple[str, Floats]]:
    """Yield the tensors of all experts, each as rows, gate and up by themselves; and sinks."""
    layer = f"blk.{name.split('.')[2]}"
    if name.endswith("sinks"):
        yield f"{layer}.attn_sinks.weight", values
        return
    kind, rows = ("bias", values) if name.endswith("_bias") else ("weight", values.swapaxes(1, 2))
    parts = {"down": rows} if ".down_proj" in name else {"gate": rows[:, ::2], "up": rows[:, 1::2]}
    for part, each in parts.items():
        yield f"{layer}.ffn_{part}_exps.{kind}", np.ascontiguousarray(each)


def _by_part(values: Floats, config: dict[str, Any]) -> Floats:
    """Return rows of q, k and v that lie by KV head with all queries first, then all keys, then all values."""
    kv_heads, rest = config["num_key_value_heads"], values.shape[1:]
    size = config["hidden_size"] // config["num_attention_heads"]
    rows = values.reshape(kv_heads, -1, size, *rest)
    return np.concatenate([part.reshape(-1, *rest) for part in (rows[:, :-2], rows[:, -2], rows[:, -1])])


def by_kind(values: Floats, config: dict[str, Any]) -> tuple[Floats, Floats]:
    """Return what makes keys of latents, turned, and what makes values: [H, L, N] and [H, V, L]."""
    both = values.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
    keys, value = both[:, : config["qk_nope_head_dim"]], both[:, config["qk_nope_head_dim"] :]
    return np.ascontiguousarray(keys.swapaxes(1, 2)), np.ascontiguousarray(value)
