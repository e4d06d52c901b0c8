"""Checkpoints that benchmarks run on: the demo model, and a seeded random one that is made on demand."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.rows import ROOT, BenchmarkError

DEMO_MODEL = ROOT / "models" / "cadenza-demo"
CACHE = ROOT / "benchmarks" / ".cache"
_NAME = "llama-10m-bf16-seed0"
_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 768,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def random_checkpoint(cache: Path = CACHE) -> Path:
    """A random Llama checkpoint of 10.5M parameters in bf16, without a tokenizer; made once, then taken from `cache`.

    Shape and seed are those with which the project's peers were measured.
    """
    folder = cache / _NAME
    if folder.is_dir():
        return folder
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    cache.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**_SHAPE)).to(torch.bfloat16)
    # Renamed once it is whole, so that a run that was stopped leaves no half checkpoint.
    made = Path(tempfile.mkdtemp(prefix=f"{_NAME}-", dir=cache))
    try:
        model.save_pretrained(made)
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return folder


def vocab_size(model: Path) -> int:
    """Of the checkpoint in a folder; raises BenchmarkError if it is none."""
    try:
        return int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise BenchmarkError(f"model {model}: no config.json that names a vocab_size ({error!r})") from None
