"""Checkpoints of transformers as GGUF files, in the layout of llama.cpp's convert_hf_to_gguf.py; needs gguf."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from tests.helpers.models import gguf_recurrent
from tests.helpers.models.gguf_blocks import Floats, quantized
from tests.helpers.models.gguf_metadata import architecture_of, read_config, rope_factors, write_config
from tests.helpers.models.gguf_tensors import CONV, POSITIONS, gguf_name, stack_names, stored_tensors, tensors_of

ROUTERS = (".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight")
"""Matrices that are F32 in any case."""
Kinds = Callable[[str], Type]
"""The type of a tensor by its name in GGUF; norms and biases are F32 in any case."""


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
    config = read_config(folder)
    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_file)
    write_config(writer, config, architecture)
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
    for name, values in tensors_of(folder, config, architecture):
        is_wide = name.endswith((*ROUTERS, ".bias")) or name == "position_embd.weight"
        kind = Type.F32 if values.ndim == 1 or is_wide or gguf_recurrent.is_small(name) else kinds(name)
        writer.add_tensor(name, quantized(values, kind), raw_dtype=kind)
    for kind in ("alpha_p", "alpha_n", "beta", "eps") if architecture == "apertus" else ():
        ends = (f".{layer}.mlp.act_fn.{kind}" for layer in range(config["num_hidden_layers"]))
        stored = dict(stored_tensors(folder))
        numbers = [float(next(value for name, value in stored.items() if name.endswith(end)).flat[0]) for end in ends]
        writer.add_array(f"xielu.{kind}", numbers)
    for name, values in (more_tensors or {}).items():
        writer.add_tensor(name, values)
    for name, factors in rope_factors(config):
        writer.add_tensor(name, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantized(folder: Path, target: Path, kinds: Kinds) -> Path:
    """Write the checkpoint in float32, its matrices as they are after a way through their types, to `target`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = architecture_of(config)
    tensors = {}
    for name, values in stored_tensors(folder):
        if values.ndim == 2 and name.endswith(".weight"):
            stored, is_turned = gguf_name(gguf_recurrent.in_layers(name, config), architecture), False
            kind = Type.F32 if name.endswith(POSITIONS) or stored.endswith(ROUTERS) else kinds(stored)
            if architecture == "gpt2" and name.endswith(CONV):
                values, is_turned = np.ascontiguousarray(values.T), True
            values = gguf.dequantize(quantized(values, kind), kind)
            values = values.T if is_turned else values
        if values.ndim == 3 and architecture != "gpt-oss" and ".conv" not in name and "_conv1d." not in name:
            is_turned = architecture == "llama4"
            stored = values.swapaxes(1, 2) if is_turned else values
            kind = kinds(f"blk.0.{stack_names(name)[0]}.weight")
            values = gguf.dequantize(quantized(np.ascontiguousarray(stored), kind), kind)
            values = values.swapaxes(1, 2) if is_turned else values
        tensors[name] = torch.from_numpy(values.copy())
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}), encoding="utf-8")
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


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
