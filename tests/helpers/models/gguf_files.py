"""Checkpoints of transformers as GGUF files, in the layout of llama.cpp's convert_hf_to_gguf.py; needs gguf."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from tests.helpers.models import gguf_recurrent
from tests.helpers.models.gguf_gemma4 import write_gemma4

ROUTERS = (".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight")
"""Matrices that are F32 in any case."""
_SPLIT = ("granitehybrid", "granitemoe", "llama4")
"""Those of which gate and up of all experts are tensors of their own."""
_EXPERT = re.compile(r"(\.experts)\.(\d+)\.(\w+\.weight)$")
Floats = NDArray[np.float32]
Kinds = Callable[[str], Type]
"""The type of a tensor by its name in GGUF; norms and biases are F32 in any case."""

ARCHITECTURES = {
    "mistral": "llama",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "hunyuan_v1_dense": "hunyuan-dense",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone_moe": "exaone-moe",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "gpt_oss": "gpt-oss",
    "granitemoe_swa": "granite_swa",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "llama4_text": "llama4",
    "minimax_m2": "minimax-m2",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_neox": "gptneox",
    "phi": "phi2",
}
"""GGUF's by transformers' model_type, where they differ."""


def all_of(kind: Type) -> Kinds:
    return lambda name: kind


def low_bits(name: str) -> Type:
    """Return the types of a model that has each kind of kernel for few bits; its rows have multiples of 256 columns."""
    kinds = {"attn_q": Type.Q2_K, "attn_k": Type.IQ4_NL, "attn_v": Type.IQ2_S, "attn_output": Type.MXFP4}
    kinds |= {"ffn_gate": Type.TQ1_0, "ffn_up": Type.IQ4_XS}
    return next((kind for part, kind in kinds.items() if f".{part}." in name), Type.Q3_K)


def write_gguf(
    folder: Path,
    path: Path,
    kinds: Kinds,
    *,
    tokens: bool = False,
    tensors_per_file: int = 0,
    metadata: dict[str, Any] | None = None,
    more_tensors: dict[str, Floats] | None = None,
) -> Path:
    """Write a checkpoint to `path`.

    Args:
        folder: with one safetensors file.
        path: of the file; of files in parts, their names begin so.
        kinds: as `Kinds` says.
        tokens: write a vocabulary of the texts <0>, <1> and so on, which no text can be tokenized with.
        tensors_per_file: 0: one file.
        metadata: added to that of the architecture, or in place of it.
        more_tensors: added, in F32.
    """
    config = _config(folder)
    architecture = _architecture(config)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_file)
    _write_config(writer, config, architecture)
    if tokens:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([f"<{token}>" for token in range(config["vocab_size"])])
        writer.add_token_scores([0.0] * config["vocab_size"])
        writer.add_token_types([1] * config["vocab_size"])
    else:
        writer.add_tokenizer_model("none")
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        _add(writer, key, value)
    for name, values in _tensors(folder, config, architecture):
        is_wide = name.endswith((*ROUTERS, ".bias")) or name == "position_embd.weight"
        kind = Type.F32 if values.ndim == 1 or is_wide or gguf_recurrent.is_small(name) else kinds(name)
        writer.add_tensor(name, quantized(values, kind), raw_dtype=kind)
    for kind in ("alpha_p", "alpha_n", "beta", "eps") if architecture == "apertus" else ():
        ends = (f".{layer}.mlp.act_fn.{kind}" for layer in range(config["num_hidden_layers"]))
        stored = dict(_stored(folder))
        numbers = [float(next(value for name, value in stored.items() if name.endswith(end)).flat[0]) for end in ends]
        writer.add_array(f"xielu.{kind}", numbers)
    for name, values in (more_tensors or {}).items():
        writer.add_tensor(name, values)
    for name, factors in _rope_factors(config):
        writer.add_tensor(name, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantized(folder: Path, target: Path, kinds: Kinds) -> Path:
    """Write the checkpoint in float32, its matrices as they are after a way through their types, to `target`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = _architecture(config)
    tensors = {}
    for name, values in _stored(folder):
        if values.ndim == 2 and name.endswith(".weight"):
            stored, is_turned = gguf_name(gguf_recurrent.in_layers(name, config), architecture), False
            kind = Type.F32 if name.endswith(_POSITIONS) or stored.endswith(ROUTERS) else kinds(stored)
            if architecture == "gpt2" and name.endswith(_CONV):
                values, is_turned = np.ascontiguousarray(values.T), True
            values = gguf.dequantize(quantized(values, kind), kind)
            values = values.T if is_turned else values
        if values.ndim == 3 and architecture != "gpt-oss" and ".conv" not in name and "_conv1d." not in name:
            is_turned = architecture == "llama4"
            stored = values.swapaxes(1, 2) if is_turned else values
            kind = kinds(f"blk.0.{_stack(name)[0]}.weight")
            values = gguf.dequantize(quantized(np.ascontiguousarray(stored), kind), kind)
            values = values.swapaxes(1, 2) if is_turned else values
        tensors[name] = torch.from_numpy(values.copy())
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}), encoding="utf-8")
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


SCALES = {"Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "TQ1_0": (52,), "TQ2_0": (64,)}
"""Bytes of a block where its float16 numbers are; of other types at 0, of those in `_TWO` at 2 too. IQ1_M's is in the
upper four bits of each of its last four words."""
_TWO = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def places_of_scales(kind: Type) -> tuple[int, ...]:
    return SCALES.get(kind.name, (0, 2) if kind.name in _TWO else (0,))


def set_scale(blocks: NDArray[np.uint8], kind: Type, place: int, number: float) -> None:
    """Set one number of `places_of_scales` in each of the blocks [..., bytes]; of MXFP4 an exponent, 255 for NaN."""
    bits = int(np.float16(number).view(np.uint16))
    if kind == Type.MXFP4:
        blocks[..., 0] = 127 + round(math.log2(number)) if 0 < number < math.inf else 255
    elif kind == Type.IQ1_M:
        for index in range(4):
            blocks[..., 49 + 2 * index] &= 0x0F
            blocks[..., 49 + 2 * index] |= (bits >> 4 * index & 0xF) << 4
    else:
        blocks[..., place], blocks[..., place + 1] = bits & 0xFF, bits >> 8


def random_blocks(kind: Type, rows: int, columns: int, seed: int, scale: float = 1.0) -> NDArray[np.uint8]:
    """Return rows of any bytes but for their scales, [rows, bytes]; those of a second place are half as large again.

    So the numbers of Q2_K have a mean of 0: 1.5 of 3 for a code.
    """
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, columns // per_block, size), np.uint8)
    for place, factor in zip(places_of_scales(kind), (1.0, 1.5), strict=False):
        set_scale(blocks, kind, place, scale * factor)
    return blocks.reshape(rows, -1)


def quantized(values: Floats, kind: Type) -> Any:
    """Return rows in a type; where gguf has no quantizer, any bytes with numbers about as large as a row's."""
    if kind.name in _BY_GGUF:
        return gguf.quantize(values, kind)
    if values.ndim == 3:
        return np.stack([quantized(each, kind) for each in values])
    columns = values.shape[1]
    usual = float(np.abs(gguf.dequantize(random_blocks(kind, 16, columns, seed=0), kind)).mean())
    return np.concatenate(
        [random_blocks(kind, 1, columns, crc32(row), float(np.abs(row).mean()) / usual) for row in values]
    )


_BY_GGUF = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0")


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


_CONV = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""GPT-2's weights that are stored transposed."""
_POSITIONS = "wpe.weight"


def _config(folder: Path) -> dict[str, Any]:
    """Return config.json by the names of fields that most families have."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = {"n_embd": "hidden_size", "n_positions": "max_position_embeddings", "n_head": "num_attention_heads"}
    names |= {
        "model_max_length": "max_position_embeddings",
        "n_layer": "num_hidden_layers",
        "n_inner": "intermediate_size",
        "ffn_hidden_size": "intermediate_size",
    }
    config |= {known: config[name] for name, known in names.items() if config.get(name)}
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type") or ()))
    heads = config["num_attention_heads"]
    if config["model_type"] == "llama4_text":
        sizes = {"moe_intermediate_size": config["intermediate_size"]}
        return config | sizes | {"intermediate_size": config["intermediate_size_mlp"]}
    if config["model_type"] == "falcon":
        return config | {"num_key_value_heads": config["num_kv_heads"] if config["new_decoder_architecture"] else 1}
    return config | ({"num_key_value_heads": heads} if config["model_type"] in ("gpt2", "gpt_neox") else {})


def _architecture(config: dict[str, Any]) -> str:
    found = gguf_recurrent.architecture_of(config)
    return found or ARCHITECTURES.get(config["model_type"], config["model_type"])


@cache
def _names(architecture: str) -> gguf.TensorNameMap:
    """A table of thousands of names: 40 ms of a processor."""
    architecture = "granite" if architecture == "granite_swa" else architecture  # which this gguf does not know
    (found,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(found, 100)


_MIXTURES = (
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "llama4_text",
    "minimax_m2",
    "mistral4",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
)
_NEIGHBOURS = ("llama", "granite", "granite_swa", "granitemoe", "mistral3", "smollm3")


def neighbours(values: Floats, heads: int) -> Floats:
    """Return rows of a query or key projection so that those a half head apart become neighbours."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _stored(folder: Path) -> Iterator[tuple[str, Floats]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file is no dict
            yield name, file.get_tensor(name).float().numpy()


def _tensors(folder: Path, config: dict[str, Any], architecture: str) -> Iterator[tuple[str, Floats]]:
    """Yield all tensors as GGUF has them."""
    experts: dict[str, list[tuple[int, Floats]]] = {}
    for stored, values in _stored(folder):
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
        elif architecture == "gpt2" and name.endswith(_CONV):
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


def _stack(name: str) -> tuple[str, ...]:
    """Return what GGUF calls the tensor of all experts, and its halves, if it has gate and up."""
    into = name.endswith(("gate_up_proj", "input_linear.weight"))
    return ("ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps") if into else ("ffn_down_exps",)


def _stacked(name: str, rows: Floats, architecture: str) -> Iterator[tuple[str, Floats]]:
    """Yield the tensors of all experts [E, rows, columns]."""
    whole, *halves = _stack(name)
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


def _write_config(writer: Any, config: dict[str, Any], architecture: str) -> None:
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config.get("qk_rope_head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    theta = full.get("rope_theta", 10_000.0)
    if full.get("alpha"):
        theta *= full["alpha"] ** (head_size / (head_size - 2))
    writer.add_rope_freq_base(theta)
    eps = next(
        (
            config[name]
            for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
            if name in config
        ),
        None,
    )
    if eps is not None:
        writer.add_layer_norm_eps(eps)
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if architecture in ("llama", "granite"):
        writer.add_vocab_size(config["vocab_size"])
    share = full.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    writer.add_rope_dimension_count(int(head_size * share))
    if architecture in _LATENTS:
        _write_latents(writer, config)
    elif head_size * heads != config["hidden_size"] or architecture.startswith(("gemma", "qwen3")):
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
    _write_rope_scaling(writer, full, config)
    if full.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(full["llama_4_scaling_beta"])
    if full.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(full["mscale_all_dim"] * (0.1 if architecture in _LATENTS else 1))
    if config.get("layer_rope_theta"):
        writer.add_array(f"{architecture}.attention.rope_pattern", [bool(each) for each in config["layer_rope_theta"]])
    if architecture == "gptneox":
        writer.add_parallel_residual(config["use_parallel_residual"])
    if config["model_type"] in (
        "cohere2",
        "exaone4",
        "exaone_moe",
        "granite_swa",
        "granitemoe_swa",
        "olmo3",
    ) and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        if config["model_type"] != "cohere2":
            writer.add_sliding_window_pattern([each == "sliding_attention" for each in config["layer_types"]])
    if config["model_type"] in _MIXTURES or config.get("enable_moe_block"):
        _write_experts(writer, config)
    if config.get("logit_scale"):
        writer.add_logit_scale(config["logit_scale"])
    if config["model_type"] in ("mistral", "phi3", "gemma2", "gemma3_text", "starcoder2"):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if architecture == "gemma4":
        write_gemma4(writer, config, rope)
    if architecture == "gemma3":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        if "full_attention" in config["layer_types"]:
            writer.add_sliding_window_pattern(config["layer_types"].index("full_attention") + 1)
    if architecture != "falcon-h1":
        _write_factors(writer, config)
    if architecture in gguf_recurrent.NAMES:
        gguf_recurrent.write_metadata(writer, config, architecture)


_LATENTS = ("deepseek2", "kimi-linear", "mistral4")


def _write_latents(writer: Any, config: dict[str, Any]) -> None:
    """As llama.cpp's conversion/deepseek.py writes them: one KV head, whose values are the latent."""
    rope, size = config["qk_rope_head_dim"], config["kv_lora_rank"]
    writer.kv_data[0].pop(f"{writer.arch}.attention.head_count_kv")
    writer.add_head_count_kv(1)
    writer.add_kv_lora_rank(size)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(size + rope)
    writer.add_value_length(size)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])


def by_kind(values: Floats, config: dict[str, Any]) -> tuple[Floats, Floats]:
    """Return what makes keys of latents, turned, and what makes values: [H, L, N] and [H, V, L]."""
    both = values.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
    keys, value = both[:, : config["qk_nope_head_dim"]], both[:, config["qk_nope_head_dim"] :]
    return np.ascontiguousarray(keys.swapaxes(1, 2)), np.ascontiguousarray(value)


def _write_factors(writer: Any, config: dict[str, Any]) -> None:
    for field, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("attention_multiplier", writer.add_attention_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
    ):
        if config.get(field):
            add(config[field])


_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
_COUNTS = ("num_local_experts", "num_experts", "moe_num_experts", "n_routed_experts")


def _write_experts(writer: Any, config: dict[str, Any]) -> None:
    """As llama.cpp's conversion/*.py write them."""
    size = config.get("moe_intermediate_size") or config["intermediate_size"]
    count = next(config[name] for name in _COUNTS if name in config)
    writer.add_expert_count(count)
    writer.add_expert_used_count(next(config[name] for name in _CHOSEN if name in config))
    if config["model_type"] not in ("mixtral", "olmoe"):
        writer.add_expert_feed_forward_length(size)
    match config["model_type"]:
        case "qwen2_moe":
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
        case "hunyuan_v1_moe":
            writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
        case "ernie4_5_moe":
            writer.add_expert_shared_count(config["moe_num_shared_experts"])
            writer.add_leading_dense_block_count(config["moe_layer_start_index"])
            writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        case "minimax_m2":
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        case "gpt_oss":
            writer.add_sliding_window(config["sliding_window"])
        case "granitemoe_swa" | "granitemoeshared":
            writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        case "llama4_text":
            writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
        case "exaone_moe":
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_expert_shared_count(config["num_shared_experts"])
            writer.add_leading_dense_block_count(config["first_k_dense_replace"])
            writer.add_expert_weights_scale(config["routed_scaling_factor"])
            writer.add_expert_weights_norm(config["norm_topk_prob"])
        case "glm4_moe" | "glm4_moe_lite" | "deepseek_v2" | "deepseek_v3" | "mistral4":
            softmax = config["model_type"] in ("deepseek_v2", "mistral4")
            kinds = gguf.ExpertGatingFuncType
            writer.add_expert_gating_func(kinds.SOFTMAX if softmax else kinds.SIGMOID)
            writer.add_expert_shared_count(config["n_shared_experts"])
            writer.add_leading_dense_block_count(config.get("first_k_dense_replace", 1))
            writer.add_expert_weights_scale(config["routed_scaling_factor"])
            writer.add_expert_weights_norm(config["norm_topk_prob"])
            writer.add_expert_group_count(config["n_group"])
            writer.add_expert_group_used_count(config["topk_group"])


def _write_rope_scaling(writer: Any, rope: dict[str, Any], config: dict[str, Any]) -> None:
    kind = rope.get("rope_type", "default")
    original: int = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings", 0)
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(original)
    if kind == "longrope":
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def _rope_factors(config: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", rope["long_factor"]
        yield "rope_factors_short.weight", rope["short_factor"]
    if config["model_type"] == "gemma4_text":
        size = next(iter(config["per_layer_config"].values()))["head_dim"]
        rotated = int(size * rope["full_attention"]["partial_rotary_factor"] / 2)
        yield "rope_freqs.weight", [1.0] * rotated + [1e30] * (size // 2 - rotated)
    if rope.get("rope_type") == "llama3":
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        yield "rope_freqs.weight", [_llama3_factor(rope, rope["rope_theta"] ** (-i / size)) for i in range(0, size, 2)]


def _llama3_factor(rope: dict[str, Any], frequency: float) -> float:
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    share = min(1.0, max(0.0, (turns - low) / (high - low)))
    return 1.0 if share == 1 else float(1 / ((1 - share) / factor + share))


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case str():
            writer.add_string(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_array(key, value)
