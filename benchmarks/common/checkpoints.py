"""Checkpoints for benchmarks: the demo model, and seeded random ones that are made on demand."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.rows import ROOT, BenchmarkError

DEMO_MODEL = ROOT / "models" / "cadenza-demo"
CACHE = ROOT / "benchmarks" / ".cache"
_COMMON: dict[str, Any] = {"rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "10m": {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 768,
        "vocab_size": 8192,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
}
"""Llama shapes by size: 10.5M parameters, where overhead dominates, SmolLM2-135M's with 134.5M, and Llama-3.2-1B's."""


def random_checkpoint(shape: str = "10m", cache: Path = CACHE) -> Path:
    """A random Llama checkpoint of one of SHAPES in bf16, without a tokenizer; made once, then read from `cache`.

    The project's peers were measured with the same shapes and seed.
    """
    name = f"llama-{shape}-bf16-seed0"
    folder = cache / name
    if folder.is_dir():
        return folder
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    cache.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**_COMMON, **SHAPES[shape])).to(torch.bfloat16)
    # Renamed when it is complete, so that an interrupted run leaves no partial checkpoint.
    made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=cache))
    try:
        model.save_pretrained(made)
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return folder


def vocab_size(model: Path) -> int:
    """Vocabulary size of the checkpoint in a folder; raises BenchmarkError if it is not a checkpoint."""
    try:
        return int(_config(model)["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise BenchmarkError(f"model {model}: no config.json that names a vocab_size ({error!r})") from None


def max_model_len(model: Path) -> int | None:
    """Most tokens of a sequence, from config.json; None if it gives none."""
    found = _config(model).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _config(model: Path) -> dict[str, Any]:
    content = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
