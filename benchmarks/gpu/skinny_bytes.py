"""Bytes that decodes of 1 to 16 rows by fused layers read and write, from the tiles and grids of their kernels.

Counted as each launch's distinct addresses, read and written: what several programs of a launch read comes from the L2
cache after the first. A test holds the counts against the addresses that Triton's interpreter sees.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from benchmarks.gpu.shapes import ModelShape
from executor_svc.gpu.kernels.attention.segments import SEGMENTS
from executor_svc.gpu.kernels.skinny.tiles import ROWS, SkinnyPlan

HOPPER_SMS = 132
_KEYS = 64
"""Of a tile of split decodes with heads of 64 or 128 numbers."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of each launch of a layer, by the kernel's name: read and written."""

    read: Counter[str]
    written: Counter[str]

    @property
    def total(self) -> int:
        return self.read.total() + self.written.total()


def layer_bytes(shape: ModelShape, rows: int, context: int, num_sms: int = HOPPER_SMS) -> LayerBytes:
    """Count a layer of a decode of so many sequences, each with `context` tokens, this step's included."""
    config, size = shape.config, shape.head_size
    hidden, width = int(config["hidden_size"]), int(config["intermediate_size"])
    heads, columns = shape.num_heads * size, (shape.num_heads + 2 * shape.num_kv_heads) * size
    qkv = SkinnyPlan.of(columns, hidden, False, num_sms)
    output, down = (SkinnyPlan.of(hidden, inner, False, num_sms) for inner in (heads, width))
    gate_up = SkinnyPlan.of(width, hidden, True, num_sms)
    found = LayerBytes(Counter(), Counter())
    _product(found, "qkv", qkv, rows, hidden, columns, norm_tiles=down.num_tiles)
    _attention(found, shape, rows, context, num_sms)
    _product(found, "output", output, rows, heads, hidden, residual=True)
    _product(found, "gate_up", gate_up, rows, hidden, width, norm_tiles=output.num_tiles, gated=True)
    _product(found, "down", down, rows, width, hidden, residual=True)
    return found


def _product(
    found: LayerBytes,
    name: str,
    plan: SkinnyPlan,
    rows: int,
    in_features: int,
    out_features: int,
    *,
    norm_tiles: int = 0,
    residual: bool = False,
    gated: bool = False,
) -> None:
    squares = 4 * ROWS
    read = 2 * in_features * ((1 + gated) * out_features + rows)
    written = 2 * rows * out_features
    if norm_tiles:
        read += 2 * in_features + norm_tiles * squares
    if residual:
        read += 2 * rows * out_features
        written += plan.num_tiles * squares
    if plan.parts > 1:
        sums, counters = plan.sums_size(gated) * 4 * rows // ROWS, 4 * plan.num_tiles
        read, written = read + sums + counters, written + sums + counters
    found.read[name] += read
    found.written[name] += written


def _attention(found: LayerBytes, shape: ModelShape, rows: int, context: int, num_sms: int) -> None:
    """Keys and values of a step, those that it writes included; the tables of steps are left out."""
    size, heads, kv_heads = shape.head_size, shape.num_heads, shape.num_kv_heads
    normed = 2 * 2 * size if "Qwen3ForCausalLM" in shape.config["architectures"] else 0
    angles = 2 * 2 * size  # all sequences have one length here, and so one row
    read = rows * 2 * ((heads + 2 * kv_heads) * size + 2 * context * kv_heads * size) + normed + angles
    written = rows * 2 * (heads * size + 2 * kv_heads * size)
    tiles = -(-context // _KEYS)
    most = SEGMENTS.max_segments(kv_heads, num_sms)
    count = -(-tiles // max(-(-tiles // most), SEGMENTS.least_keys // _KEYS))
    if count > 1:
        records, counters = 4 * rows * heads * count * (size + 2), 4 * rows * kv_heads
        read, written = read + records + counters, written + records + counters
    found.read["attention"] += read
    found.written["attention"] += written


def step_bytes(shape: ModelShape, rows: int, context: int, num_sms: int = HOPPER_SMS) -> int:
    """Count a step: its layers, and the head by a product that reads its weight once and writes logits, read again."""
    logits = 2 * 4 * rows * shape.vocab_size
    return shape.num_layers * layer_bytes(shape, rows, context, num_sms).total + 2 * shape.head_parameters + logits


def over_limit(shape: ModelShape, rows: int, context: int, num_sms: int = HOPPER_SMS) -> float:
    """Return the bytes of a step over those of all matrices, keys and values, read once."""
    return step_bytes(shape, rows, context, num_sms) / shape.decode_bytes(rows, context)
