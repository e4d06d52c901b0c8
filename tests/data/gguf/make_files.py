"""Makes the files of this folder anew. Needs llama-cpp-python 0.3.36 beside gguf, torch and transformers.

    PYTHONPATH=. python tests/data/gguf/make_files.py

types.gguf: a tensor of each quantized type, by ggml's own quantizers. llama-q4_k_m.gguf: a tiny Llama, by llama.cpp's
`llama_model_quantize`; llama-q4_k_m.json: prompts, llama.cpp's greedy tokens, and by how much each won.
"""

from __future__ import annotations

import ctypes
import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType as Type

from tests.checkpoints import make_checkpoint
from tests.helpers.models.gguf_files import all_of, write_gguf

HERE = Path(__file__).parent
TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4",
         "TQ1_0", "TQ2_0", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S")  # fmt: skip
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.15,
    "tie_word_embeddings": True,
}
PROMPTS = ([3, 14, 15, 92, 65, 35], [2, 71, 82, 81, 8], [10] * 20)
NEW_TOKENS = 24


def main() -> None:
    make_types(HERE / "types.gguf")
    model = HERE / "llama-q4_k_m.gguf"
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "llama", "llama", seed=23, **SHAPE)
        dense = write_gguf(checkpoint, Path(folder) / "dense.gguf", all_of(Type.F32))
        quantize(dense, model, llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M)
    found = [greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    lines = ",\n  ".join(json.dumps(each) for each in found)
    model.with_suffix(".json").write_text(f"[\n  {lines}\n]\n", encoding="utf-8")


def make_types(path: Path) -> None:
    """Write a tensor [3, 512] of each type; columns are equally important to those that ask for it."""
    library = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    quantize_chunk = library.ggml_quantize_chunk
    quantize_chunk.restype = ctypes.c_size_t
    integers = [ctypes.c_int64] * 3
    quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *integers, ctypes.c_void_p]
    important = np.ones(512, np.float32)
    draw, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
    for name in TYPES:
        values = draw.standard_normal((3, 512), np.float32)
        block, size = gguf.GGML_QUANT_SIZES[Type[name]]
        stored = np.empty((3, 512 // block * size), np.uint8)
        weights = important.ctypes.data if name.startswith("IQ") else None
        written = quantize_chunk(Type[name], values.ctypes.data, stored.ctypes.data, 0, 3, 512, weights)
        assert written == stored.nbytes
        writer.add_tensor(name, stored, raw_dtype=Type[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, kind: int) -> None:
    """Let llama.cpp quantize a file."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = kind, 1
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params):
        raise RuntimeError(f"llama.cpp cannot quantize {source}")


def greedy(path: Path, prompt: list[int], count: int) -> dict[str, list[Any]]:
    """Return llama.cpp's greedy tokens after a prompt, and how far ahead each was, as a share of the largest logit."""
    model = llama_cpp.Llama(str(path), n_ctx=256, logits_all=True, n_threads=1, verbose=False)
    tokens, gaps = list(prompt), []
    for _ in range(count):
        model.reset()
        model.eval(tokens)
        logits = np.array(model.scores[len(tokens) - 1])
        second, best = np.partition(logits, -2)[-2:]
        gaps.append(round(float((best - second) / np.abs(logits).max()), 4))
        tokens.append(int(logits.argmax()))
    return {"prompt": prompt, "tokens": tokens[len(prompt) :], "gaps": gaps}


if __name__ == "__main__":
    main()
