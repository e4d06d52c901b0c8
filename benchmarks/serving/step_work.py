"""The work that a model's steps cannot avoid: bytes read and operations, from its config.json and its stored matrices.

Norms, biases and the rows of the embedding table are left out: they are less than a thousandth of the rest. Which
matrices are multiplied with activations in 8 bits is the executor's own rule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.common.workload import Request
from benchmarks.peers.gguf_families import feed_forward_size, is_recurrent
from benchmarks.peers.gguf_file import num_experts_of
from benchmarks.serving.recurrent_work import recurrent_sizes
from cadenza_common.gguf.file import read_gguf
from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.cpu.kernels.quantized.int8_codes import most_code
from executor_svc.cpu.kernels.quantized.int8_dots import words_in_short
from executor_svc.cpu.kernels.quantized.layout import PackedLayout
from executor_svc.cpu.stored_linear import QuantizedActivations, has_kernel, int8_rows
from executor_svc.device.stored_linear import QuantFormat
from executor_svc.models.gguf.block_types import BLOCK_TYPES
from executor_svc.models.quantized.round_to_nearest import INT4, INT8, Rounding


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
class ExpertWork:
    """The experts of a mixture."""

    one: Matrices
    """Of one expert in every layer."""
    num_experts: int
    num_chosen: int
    touched: Mapping[int, float]
    """Experts of a layer that a step reads, by its number of rows, as a model's routers chose."""

    def work(self, num_rows: int) -> Work:
        """Chosen experts are read once, and each row is multiplied with its own."""
        if not num_rows:
            return Work(0, 0)
        share = float(np.interp(num_rows, list(self.touched), list(self.touched.values())))
        return replace(self.one.work(num_rows * self.num_chosen), read_bytes=round(share * self.one.num_bytes))


@dataclass(frozen=True, slots=True)
class DecoderWork:
    """Sizes of a decoder with gated MLPs, or experts in their place."""

    layers: Matrices
    """Of all layers, but for their experts."""
    head: Matrices
    """That gives logits; a tied embedding table is the same matrix."""
    kv_bytes_per_token: int
    attention_width: int
    """Number of query heads times their size, summed over the layers."""
    experts: ExpertWork | None = None
    state_bytes: int = 0
    """Of the recurrent layers' states of a sequence: a step reads them and writes them."""
    state_flops: int = 0
    """Of a token's recurrences."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices that a step of one token with logits reads."""
        experts = 0 if self.experts is None else self.experts.num_chosen * self.experts.one.num_bytes
        return self.layers.num_bytes + self.head.num_bytes + experts

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
        experts = Work(0, 0) if self.experts is None else self.experts.work(num_tokens)
        states = Work(2 * self.state_bytes * len(chunks), self.state_flops * num_tokens)
        return self.layers.work(num_tokens) + experts + self.head.work(num_logits) + cached + states

    def requests(self, requests: Sequence[Request]) -> Work:
        """Requests at once: all prompts in one step, then a step for each further token of all that still run.

        No schedule reads the matrices less often, because the longest output needs a step for each of its tokens.
        """
        total = self.step([Chunk(0, len(each.prompt)) for each in requests])
        for made in range(1, max(each.output_len for each in requests)):
            total += self.step([Chunk(len(each.prompt) + made - 1, 1) for each in requests if each.output_len > made])
        return total


def decoder_work(config: Mapping[str, Any], item_bytes: int = 2) -> DecoderWork:
    """The work of a model of `gguf_families` from its config.json, with weights and cache of item_bytes.

    A mixture's steps choose all experts, until `ExpertWork.touched` says how many.
    """
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    num_recurrent = sum(is_recurrent(config))
    attending = layers - num_recurrent
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    size = int(config.get("head_dim") or hidden // heads)
    gates = heads if config.get("model_type") == "qwen3_5_text" else 0
    num_experts = num_experts_of(config)
    feed_forward = num_experts or 3 * feed_forward_size(config)
    recurrence = recurrent_sizes(config, item_bytes)
    in_layers = hidden * (attending * (2 * heads + gates + 2 * kv_heads) * size + layers * feed_forward)
    in_layers += num_recurrent * recurrence.parameters
    in_head = int(config["vocab_size"]) * hidden
    return DecoderWork(
        layers=Matrices(in_layers, item_bytes * in_layers),
        head=Matrices(in_head, item_bytes * in_head),
        kv_bytes_per_token=2 * item_bytes * attending * kv_heads * size,
        attention_width=attending * heads * size,
        experts=_experts(config, item_bytes) if num_experts else None,
        state_bytes=num_recurrent * recurrence.state_bytes,
        state_flops=num_recurrent * recurrence.flops,
    )


def _experts(config: Mapping[str, Any], item_bytes: int) -> ExpertWork:
    width = int(config.get("moe_intermediate_size", config["intermediate_size"]))
    in_one = int(config["num_hidden_layers"]) * int(config["hidden_size"]) * 3 * width
    num_experts, num_chosen = num_experts_of(config), int(config["num_experts_per_tok"])
    every = {1: float(num_chosen), 2: float(num_experts)}
    return ExpertWork(Matrices(in_one, item_bytes * in_one), num_experts, num_chosen, every)


def folder_work(folder: Path) -> DecoderWork:
    """The work of a checkpoint in bf16."""
    return decoder_work(json.loads((folder / "config.json").read_text(encoding="utf-8")))


_HEAD, _TABLE = "output.weight", "token_embd.weight"
_COLUMNS = 256
"""Of a weight whose shape does not matter: whole groups and super groups of every format."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix of the model."""

    part: Literal["layers", "head", "experts"]
    """head: it gives logits, as a tied table of embeddings does; experts: it is one of those of a layer."""
    parameters: int
    num_bytes: int
    format: QuantFormat | None
    """None: dense."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What a step reads and multiplies."""

    matrices: tuple[StoredMatrix, ...]
    stored_bytes: int
    """Of all tensors, those that no step reads whole included."""
    int8_formats: frozenset[QuantFormat]
    """Formats that are multiplied with activations in 8 bits."""

    def work(self, dense: DecoderWork) -> DecoderWork:
        """The work of a decoder with these matrices in place of dense ones."""
        experts = None if dense.experts is None else replace(dense.experts, one=self._together("experts"))
        return replace(dense, layers=self._together("layers"), head=self._together("head"), experts=experts)

    def _together(self, part: str) -> Matrices:
        own = [each for each in self.matrices if each.part == part]
        int8 = sum(each.parameters for each in own if each.format in self.int8_formats)
        return Matrices(sum(each.parameters for each in own), sum(each.num_bytes for each in own), int8)

    @property
    def words_in_short(self) -> int:
        """Of the smallest codes that are multiplied with activations in 8 bits: see `int8_dots`."""
        return max(words_in_short(most_code(kind)) for kind in self.int8_formats)

    @property
    def activations(self) -> str:
        """What the matrices are multiplied with, for rows: int8, bf16, or int8 for some formats by name."""
        formats = {each.format for each in self.matrices}
        if not self.int8_formats:
            return "bf16"
        if formats == self.int8_formats:
            return "int8"
        return f"int8 for {', '.join(sorted(kind.name for kind in self.int8_formats))}; else bf16"


def gguf_weights(path: Path, isa: Isa, option: QuantizedActivations) -> StoredWeights:
    """The weights of a GGUF file on a level; option: --quantized-activations. Raises GgufError for a broken file."""
    tensors = read_gguf(path).tensors
    head = _HEAD if _HEAD in tensors else _TABLE
    matrices = []
    for tensor in tensors.values():
        if len(tensor.shape) < 2 or (tensor.name == _TABLE and head != _TABLE):
            continue
        *experts, rows, columns = tensor.shape
        known = BLOCK_TYPES.get(tensor.type.name)
        kind = None if known is None else known.format
        part: Any = "head" if tensor.name == head else "experts" if experts else "layers"
        matrices.append(StoredMatrix(part, rows * columns, tensor.num_bytes // math.prod(experts), kind))
    stored_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    return StoredWeights(tuple(matrices), stored_bytes, _int8_formats(matrices, isa, option))


def rounded_weights(
    dense: DecoderWork, tied: bool, rounding: Rounding, isa: Isa, option: QuantizedActivations
) -> StoredWeights:
    """The weights of a checkpoint that --quantization rounds; its tables are in 8 bits. tied: it has one table."""

    def matrix(part: Any, parameters: int, kind: QuantFormat) -> StoredMatrix:
        return StoredMatrix(part, parameters, kind.num_bytes((1, parameters)), kind)

    layers = matrix("layers", dense.layers.parameters, INT8 if rounding == "int8" else INT4)
    head = matrix("head", dense.head.parameters, INT8)
    stored_bytes = layers.num_bytes + head.num_bytes * (1 if tied else 2)
    return StoredWeights((layers, head), stored_bytes, _int8_formats((layers, head), isa, option))


def _int8_formats(matrices: Iterable[StoredMatrix], isa: Isa, option: QuantizedActivations) -> frozenset[QuantFormat]:
    kinds = {each.format for each in matrices if each.format is not None}
    able = {kind for kind in kinds if has_kernel(kind, _COLUMNS, isa)}
    return frozenset(kind for kind in able if int8_rows(isa, PackedLayout(kind, _COLUMNS), False, option) is not None)
