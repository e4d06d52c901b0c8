"""Memory while a model is loaded on the CPU: hardly more than what stays, and a tied table is held once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.marks import short_and_long
from tests.helpers.paths import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status"),
]

_HIDDEN, _INNER, _VOCABULARY, _LAYERS = 1024, 4096, 40000, 3


def _save_llama(folder: Path, *, with_weights: bool = True) -> None:
    """Save a tied Llama of 187 MB in bf16."""
    sizes = {"model.embed_tokens.weight": (_VOCABULARY, _HIDDEN), "model.norm.weight": (_HIDDEN,)}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        sizes |= {f"{prefix}.self_attn.{name}_proj.weight": (_HIDDEN, _HIDDEN) for name in "qkvo"}
        sizes |= {f"{prefix}.mlp.{name}_proj.weight": (_INNER, _HIDDEN) for name in ("gate", "up")}
        sizes |= {f"{prefix}.mlp.down_proj.weight": (_HIDDEN, _INNER)}
        sizes |= {f"{prefix}.{name}_layernorm.weight": (_HIDDEN,) for name in ("input", "post_attention")}
    if with_weights:
        save_file(
            {name: torch.full(size, 0.01, dtype=torch.bfloat16) for name, size in sizes.items()},
            folder / "model.safetensors",
        )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": _HIDDEN, "intermediate_size": _INNER, "vocab_size": _VOCABULARY, "num_hidden_layers": _LAYERS,
        "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _save_gpt2(folder: Path) -> None:
    """Save the config of a tied GPT-2 of 158 MB in bf16."""
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "bfloat16", "n_embd": _HIDDEN,
        "n_layer": _LAYERS, "n_head": 16, "n_positions": 256, "vocab_size": _VOCABULARY, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _save_mixture(folder: Path) -> None:
    """Save a mixture of 205 MB in bf16, whose tensors are those of all experts."""
    hidden, inner, count = _HIDDEN, 512, 48
    sizes = {f"{name}.weight": (2000, hidden) for name in ("model.embed_tokens", "lm_head")}
    sizes["model.norm.weight"] = (hidden,)
    for prefix in ("model.layers.0", "model.layers.1"):
        sizes |= {f"{prefix}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        sizes |= {f"{prefix}.self_attn.{name}_norm.weight": (64,) for name in "qk"}
        sizes |= {f"{prefix}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        sizes |= {f"{prefix}.mlp.gate.weight": (count, hidden)}
        sizes[f"{prefix}.mlp.experts.gate_up_proj"] = (count, 2 * inner, hidden)
        sizes[f"{prefix}.mlp.experts.down_proj"] = (count, hidden, inner)
    save_file(
        {name: torch.full(size, 0.01, dtype=torch.bfloat16) for name, size in sizes.items()},
        folder / "model.safetensors",
    )
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "hidden_size": hidden, "intermediate_size": inner, "moe_intermediate_size": inner, "num_experts": count,
        "num_experts_per_tok": 4, "vocab_size": 2000, "num_hidden_layers": 2, "num_attention_heads": 16,
        "num_key_value_heads": 16, "head_dim": 64, "max_position_embeddings": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _load(folder: Path, load_format: str, numerics: str, quantization: str = "none") -> tuple[int, int, int]:
    """Load a model in a process of its own; return the bytes of its weights, those that stay, and the peak."""
    options = [str(folder), load_format, numerics, quantization]
    command = [sys.executable, "-m", "tests.executor_svc.models.load_memory", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT)
    weight_bytes, stays, peak = json.loads(done.stdout.splitlines()[-1])
    return weight_bytes, stays, peak


@pytest.mark.parametrize("load_format", short_and_long(["auto", "dummy"], ["auto"]))
def test_the_peak_is_hardly_more_than_what_stays(tmp_path: Path, load_format: str) -> None:
    _save_llama(tmp_path, with_weights=load_format == "auto")
    weight_bytes, stays, peak = _load(tmp_path, load_format, "auto")
    assert weight_bytes > 180e6
    # A second copy of the table would be 44 % more.
    assert weight_bytes <= stays <= 1.2 * weight_bytes
    assert peak <= 1.15 * stays


@pytest.mark.parametrize("quantization", short_and_long(["none", "int4"], ["int4"]))
def test_the_peak_of_a_mixture_too(tmp_path: Path, quantization: str) -> None:
    _save_mixture(tmp_path)
    weight_bytes, stays, peak = _load(tmp_path, "auto", "auto", quantization)
    assert weight_bytes > 55e6
    assert peak <= 1.15 * stays


@pytest.mark.long
def test_a_tied_table_is_held_once_through_transformers(tmp_path: Path) -> None:
    _save_gpt2(tmp_path)
    weight_bytes, stays, _ = _load(tmp_path, "dummy", "fast")
    assert weight_bytes > 150e6
    # Modules of transformers and the check of logits leave some 115 MB; a second table and kept weights, 123 MB more.
    assert stays - weight_bytes < 165e6
