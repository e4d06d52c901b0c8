"""The work that a model's steps cannot avoid: bytes read and operations, from its config.json.

Norms, biases and the rows of the embedding table are left out: they are less than a thousandth of the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.workload import Request


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes that are read once and operations, of a step or of several."""

    read_bytes: int
    flops: int
    int8_ops: int = 0
    """Operations of products of integers in 8 bits, beside flops."""

    def __add__(self, other: Work) -> Work:
        return Work(self.read_bytes + other.read_bytes, self.flops + other.flops, self.int8_ops + other.int8_ops)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A sequence's part of a step."""

    context: int
    """Tokens whose keys and values are in the cache."""
    count: int
    """New tokens."""
    num_logits: int = 1
    """Rows of logits: 1 if the step computes a token, 0 before the end of the prompt."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """Matrices that a step reads together."""

    parameters: int
    num_bytes: int
    """As they are stored, with their scales."""
    int8_parameters: int = 0
    """Those that are multiplied with activations in 8 bits, by integer products."""

    def work(self, num_rows: int) -> Work:
        """Read once and multiplied with so many rows; none: not read."""
        if not num_rows:
            return Work(0, 0)
        dense = self.parameters - self.int8_parameters
        return Work(self.num_bytes, 2 * dense * num_rows, 2 * self.int8_parameters * num_rows)


@dataclass(frozen=True, slots=True)
class DecoderWork:
    """Sizes of a dense decoder with a gated MLP."""

    layers: Matrices
    """Of all layers."""
    head: Matrices
    """That gives logits; a tied embedding table is the same matrix."""
    kv_bytes_per_token: int
    attention_width: int
    """Number of query heads times their size, summed over the layers."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices that a step with logits reads."""
        return self.layers.num_bytes + self.head.num_bytes

    def step(self, chunks: Sequence[Chunk]) -> Work:
        """A step: every matrix is read once, and the cached keys and values of each sequence once."""
        num_tokens = sum(chunk.count for chunk in chunks)
        num_logits = sum(chunk.num_logits for chunk in chunks)
        # A new token attends to the cached ones, to the new ones before it and to itself: a product with its key
        # and one with its value.
        attended = sum(chunk.count * chunk.context + chunk.count * (chunk.count + 1) // 2 for chunk in chunks)
        cached = Work(
            self.kv_bytes_per_token * sum(chunk.context for chunk in chunks), 4 * self.attention_width * attended
        )
        return self.layers.work(num_tokens) + self.head.work(num_logits) + cached

    def requests(self, requests: Sequence[Request]) -> Work:
        """Requests at once: all prompts in one step, then a step for each further token of all that still run.

        No schedule reads the matrices less often, because the longest output needs a step for each of its tokens.
        """
        total = self.step([Chunk(0, len(each.prompt)) for each in requests])
        for made in range(1, max(each.output_len for each in requests)):
            total += self.step([Chunk(len(each.prompt) + made - 1, 1) for each in requests if each.output_len > made])
        return total


def decoder_work(config: Mapping[str, Any], item_bytes: int = 2) -> DecoderWork:
    """The work of a Llama or Qwen3 from its config.json, with weights and cache of item_bytes."""
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    size = int(config.get("head_dim") or hidden // heads)
    projections = (2 * heads + 2 * kv_heads) * size
    in_layers = layers * hidden * (projections + 3 * int(config["intermediate_size"]))
    in_head = int(config["vocab_size"]) * hidden
    return DecoderWork(
        layers=Matrices(in_layers, item_bytes * in_layers),
        head=Matrices(in_head, item_bytes * in_head),
        kv_bytes_per_token=2 * item_bytes * layers * kv_heads * size,
        attention_width=layers * heads * size,
    )


def folder_work(folder: Path) -> DecoderWork:
    """The work of a checkpoint in bf16."""
    return decoder_work(json.loads((folder / "config.json").read_text(encoding="utf-8")))
