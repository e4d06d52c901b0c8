"""A checkpoint of one of a few families in bf16 as a GGUF file for llama.cpp, in bf16 or few bits, without a tokenizer.

The layout is that of llama.cpp's convert_hf_to_gguf.py: its `llama` architecture rotates neighbouring elements of a
head where transformers rotates halves, so the rows of the query and key projections change places. Needs gguf and
numpy; for few bits llama-cpp-python, whose `llama_model_quantize` makes them. As a program it makes a file; arguments:
the model's folder, the cache's folder, one of QUANTIZED_TYPES.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.gguf_families import (
    FAMILIES,
    feed_forward_size,
    is_recurrent,
    stored_values,
    write_recurrent_sizes,
)

QUANTIZED_TYPES = {"Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15, "MXFP4": 38}
"""llama.cpp's file types in few bits, by its numbers (LLAMA_FTYPE_MOSTLY_...); MXFP4 is of experts, beside Q8_0."""
_EXPERT = re.compile(r"(?<=\.experts\.)(\d+)\.")


def gguf_path(folder: Path, cache: Path, weights: str = "bf16") -> Path:
    """The place of a checkpoint's GGUF file, one per version of the checkpoint; weights: bf16 or a quantized type."""
    stamp = int((folder / "config.json").stat().st_mtime)
    return cache / f"{folder.name}-{stamp}{'' if weights == 'bf16' else f'-{weights}'}.gguf"


def gguf_of(folder: Path, cache: Path, weights: str = "bf16") -> Path:
    """The checkpoint as GGUF, made once in `cache`; in few bits it is made of the file in bf16.

    A GGUF file in the folder's place is taken as it is. Raises ValueError for a checkpoint of another family or not in
    bf16.
    """
    if folder.suffix == ".gguf":
        return folder
    path = gguf_path(folder, cache, weights)
    if path.exists():
        return path
    if weights != "bf16":
        source = gguf_of(folder, cache)
        return _made(path, lambda part: _quantize(source, part, QUANTIZED_TYPES[weights]))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] not in FAMILIES:
        raise ValueError(f"{folder}: a {config['model_type']} model; this converts {' and '.join(FAMILIES)} only")
    return _made(path, lambda part: _write(folder, config, part))


def _made(path: Path, make: Callable[[Path], None]) -> Path:
    """The path of a file that has been made under another name, so that an interrupted run leaves no part of it."""
    handle, part = tempfile.mkstemp(prefix=path.stem, suffix=".part", dir=path.parent)
    os.close(handle)
    try:
        make(Path(part))
        Path(part).rename(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    return path


def _quantize(source: Path, path: Path, file_type: int) -> None:
    library = importlib.import_module("llama_cpp")
    library.llama_backend_init()
    params = library.llama_model_quantize_default_params()
    params.ftype, params.nthread = file_type, os.cpu_count() or 1
    code = library.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params))
    if code:
        raise RuntimeError(f"{source}: llama_model_quantize failed with {code}")


def neighbours(weight: Any, num_heads: int) -> Any:
    """Rows of a query or key projection `[rows, columns]` so that those a half head apart become neighbours."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write(folder: Path, config: dict[str, Any], path: Path) -> None:
    gguf, numpy = importlib.import_module("gguf"), importlib.import_module("numpy")
    family = FAMILIES[config["model_type"]]
    writer = gguf.GGUFWriter(str(path), family.architecture)
    _write_config(writer, gguf, config)
    for name, values in _stacked(_tensors(folder, numpy), numpy):
        if family.neighbours and "q_proj" in name:
            values = neighbours(values, config["num_attention_heads"])
        elif family.neighbours and "k_proj" in name:
            values = neighbours(values, config["num_key_value_heads"])
        if values.ndim == 1 or "conv" in name.split(".")[-2] or name.endswith(".mlp.gate.weight"):
            # Norms, convolutions, constants of recurrences and routers are fp32 there.
            values = (values.astype(numpy.uint32) << 16).view(numpy.float32)
            writer.add_tensor(family.tensor_name(name), stored_values(numpy, config, name, values))
        else:
            raw = numpy.ascontiguousarray(values).view(numpy.uint8)
            writer.add_tensor(family.tensor_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def num_experts_of(config: Mapping[str, Any]) -> int:
    """Experts of a layer by a config.json, whose name for it depends on transformers' version; 0: it has none."""
    return int(config.get("num_local_experts") or config.get("num_experts") or 0)


def _write_config(writer: Any, gguf: Any, config: dict[str, Any]) -> None:
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads", num_heads)
    recurrent = is_recurrent(config)
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope of type {rope['rope_type']}: this converts the default one only")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(feed_forward_size(config))
    writer.add_head_count(num_heads)
    by_layer = config["model_type"] == "lfm2"  # whose layers without attention have none
    writer.add_head_count_kv([0 if each else num_kv_heads for each in recurrent] if by_layer else num_kv_heads)
    head_size = config.get("head_dim") or config["hidden_size"] // num_heads
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(int(head_size * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    write_recurrent_sizes(writer, config)
    if num_experts := num_experts_of(config):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")


def _stacked(tensors: Iterator[tuple[str, Any]], numpy: Any) -> Iterator[tuple[str, Any]]:
    """The tensors, those of all experts as one `[experts, rows, columns]`."""
    experts: dict[str, dict[int, Any]] = {}
    for name, values in tensors:
        if (found := _EXPERT.search(name)) is None:
            yield name, values
        else:
            experts.setdefault(_EXPERT.sub("", name), {})[int(found[1])] = values
    for name in list(experts):
        yield name, numpy.stack([values for _, values in sorted(experts.pop(name).items())])


def _tensors(folder: Path, numpy: Any) -> Iterator[tuple[str, Any]]:
    """All tensors of the folder's safetensors files as 16-bit patterns, which numpy has no bf16 for."""
    for path in sorted(folder.glob("*.safetensors")):
        data = numpy.memmap(path, dtype=numpy.uint8, mode="r")
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        for name, entry in json.loads(data[8:start].tobytes()).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise ValueError(f"{path}: {name} is {entry['dtype']}; this converts BF16 only")
            first, end = entry["data_offsets"]
            yield name, data[start + first : start + end].view(numpy.uint16).reshape(entry["shape"])


if __name__ == "__main__":
    gguf_of(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
