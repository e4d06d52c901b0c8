"""GGUF files that hold a vocabulary only, and the vocabularies of tests/data/gguf_tokenizers."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import gguf

DATA = Path(__file__).parents[2] / "data" / "gguf_tokenizers"
DEMO = Path(__file__).parents[3] / "models" / "cadenza-demo" / "tokenizer.json"
_CONTROL = 3

Pairs = dict[str, Any]
"""Metadata by key, without `tokenizer.ggml.` unless the key has a dot."""


def write_vocabulary(path: Path, pairs: Pairs) -> Path:
    """Write a file without tensors; integers become uint32, lists of integers int32, floats float32."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in full_keys(pairs).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def full_keys(pairs: Pairs) -> Pairs:
    """Return metadata by whole keys."""
    return {name if "." in name else f"tokenizer.ggml.{name}": value for name, value in pairs.items()}


@functools.cache
def recorded(name: str) -> Any:
    """Return the content of one of the data files."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def vocabulary(name: str) -> Pairs:
    """Return the metadata of a recorded case: what all of its vocabulary share, and its own.

    `normal` of a case: tokens that are normal ones in it.
    """
    case = recorded("cases")[name]
    base = demo_vocabulary() if case["vocabulary"] == "demo" else recorded(case["vocabulary"])
    types = [
        1 if text in case.get("normal", ()) else kind
        for text, kind in zip(base["tokens"], base["token_type"], strict=True)
    ]
    return base | {"token_type": types} | case["metadata"]


def demo_vocabulary() -> Pairs:
    """Return the demo model's tokens and merges; its own regular expression has no name in GGUF."""
    content = json.loads(DEMO.read_text(encoding="utf-8"))
    ids = content["model"]["vocab"]
    tokens = sorted(ids, key=ids.__getitem__)
    special = {token["content"] for token in content["added_tokens"]}
    return {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [_CONTROL if text in special else 1 for text in tokens],
        "merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "bos_token_id": ids["<|bos|>"],
        "eos_token_id": ids["<|eos|>"],
    }
