"""Shapes of the measured models, as config.json states them; their weights are random."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder, and the least that a step has to read and multiply."""

    name: str
    config: Mapping[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def num_heads(self) -> int:
        return int(self.config["num_attention_heads"])

    @property
    def num_kv_heads(self) -> int:
        return int(self.config["num_key_value_heads"])

    @property
    def head_size(self) -> int:
        return int(self.config["head_dim"])

    @property
    def layer_parameters(self) -> int:
        """Number of parameters in the matrices of all layers."""
        hidden, width = int(self.config["hidden_size"]), int(self.config["intermediate_size"])
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_size
        return self.num_layers * hidden * (heads + 3 * width)

    @property
    def head_parameters(self) -> int:
        """Number of parameters in the matrix that makes logits."""
        return self.vocab_size * int(self.config["hidden_size"])

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values per token, in 16 bits."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_size

    def decode_bytes(self, batch: int, context: int) -> int:
        """Bytes that a step of `batch` sequences must read: all matrices in 16 bits once, and keys and values.

        A separate embedding table is left out: only a few of its rows are read.
        """
        return 2 * (self.layer_parameters + self.head_parameters) + batch * context * self.kv_bytes_per_token

    def prefill_flops(self, num_seqs: int, length: int) -> int:
        """Operations of whole prompts: matrices for each token, logits for the last one, causal attention."""
        attention = 4 * self.num_heads * self.head_size * self.num_layers * length * (length + 1) // 2
        return num_seqs * (2 * self.layer_parameters * length + 2 * self.head_parameters + attention)


_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
}
LLAMA_8B = ModelShape(
    "llama-3.1-8b",
    {
        **_LLAMA,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
)
QWEN3_06B = ModelShape(
    "qwen3-0.6b",
    {
        **_LLAMA,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
)
TINY = ModelShape(
    "tiny",
    {
        **_LLAMA,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "intermediate_size": 96,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
)
"""For trials without a GPU."""
SHAPES = {shape.name: shape for shape in (LLAMA_8B, QWEN3_06B, TINY)}
SHARES = {1: 0.75, 4: 0.80, 16: 0.85, 64: 0.88, 256: 0.88}
"""The share of the limit that the 8B shape is to reach, by sequences of a decode step."""


def write_config(shape: ModelShape, folder: Path) -> Path:
    """Make a model folder that holds only config.json, for `--load-format dummy`; returns its path."""
    made = folder / shape.name
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text(json.dumps(dict(shape.config), indent=1), encoding="utf-8")
    return made
