"""Recurrences with a matrix for each head: the gated delta rule, with a decay for a head or for each key, and Mamba-2.

A program has some columns of a head's matrix of one sequence, a *part* (`device.states.HeadUnit`), in registers. It
folds the rows of the tail, then goes through the step's rows one after the other: prompts, chunks, decodes and drafts
alike, by the same instructions, so that a row's bits do not depend on how tokens are cut into steps. Columns do not
depend on each other, and no program reads what another writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.rows import DTYPES, check, check_rows, variant
from executor_svc.gpu.kernels.states.step import (
    LINE_BYTES,
    STEP_POINTERS,
    StepTensors,
    first_save,
    line_of,
    sequence_of,
)
from executor_svc.gpu.kernels.variant import Variant
from executor_svc.plan.state_sizes import DeltaState, HeadUnit, MambaState, Recurrence

LARGEST_KEY = 256
"""Numbers of a key that a program can have in registers."""
_LINE = LINE_BYTES // 4
_WARP_NUMBERS = 4096
"""Numbers of a part for each warp: 128 registers of a thread."""
_L2_EPS = tl.constexpr(1e-6)
_SOFTPLUS_BELOW = tl.constexpr(20.0)


@triton.jit
def _softplus(x):
    """log(1 + e^x), from 20 on x, as PyTorch does.

    log1p is log times the quotient that cancels the rounding of 1 + y (Kahan; in Goldberg, "What every computer
    scientist should know about floating-point arithmetic", 1991, theorem 4).
    """
    y = tl.exp(tl.minimum(x, _SOFTPLUS_BELOW))
    more = y + 1.0
    taken = more - 1.0
    small = taken == 0.0
    found = tl.where(small, y, tl.log(more) * (y / tl.where(small, 1.0, taken)))
    return tl.where(x > _SOFTPLUS_BELOW, x, found)


@triton.jit
def _two_sums(first, second):
    """Return the sums of two tensors along the first axis, added together: threads wait for each other once."""
    return tl.split(tl.sum(tl.join(first, second), 0))


@triton.jit
def _unit_lengths(first, second):
    sums = _two_sums(first * first, second * second)
    return first * (1.0 / tl.sqrt_rn(sums[0] + _L2_EPS)), second * (1.0 / tl.sqrt_rn(sums[1] + _L2_EPS))


@triton.jit
def _folded_in(decayed, key, added):
    """Return a matrix, multiplied with its decay already, with one more row folded in."""
    keys, rows = tl.broadcast(key[:, None], added[None, :])
    return tl.fma(keys, rows, decayed)


@triton.jit
def _load_row(
    x, gates, strengths, at, there, query_at, key_at, value_at, gate_at, strength_at, key_mask, value_mask,
    X_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr, STRENGTH_STRIDE: tl.constexpr, DELTA: tl.constexpr,
    BY_KEY: tl.constexpr,
):  # fmt: skip
    """Return a row's query, key, value, gate and strength as they are; zeros if it is not there."""
    row = at.to(tl.int64)
    query = tl.load(x + row * X_STRIDE + query_at, key_mask & there, other=0.0)
    key = tl.load(x + row * X_STRIDE + key_at, key_mask & there, other=0.0)
    value = tl.load(x + row * X_STRIDE + value_at, value_mask & there, other=0.0)
    gate_mask = key_mask & there if BY_KEY else there
    gate = tl.load(gates + row * GATE_STRIDE + gate_at, gate_mask, other=0.0)
    strength = gate
    if DELTA:
        strength = tl.load(strengths + row * STRENGTH_STRIDE + strength_at, there, other=0.0)
    return query, key, value, gate, strength


@triton.jit(do_not_specialize=["pages", "page_lines"])
def _recur(
    x, gates, strengths, decays, biases, skips, out, pool, units, starts, lens, slots, folded, tables, save_starts,
    save_positions, save_tables, least, most, scale, pages, page_lines, DELTA: tl.constexpr, BY_KEY: tl.constexpr,
    TILED: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, COLUMNS: tl.constexpr,
    X_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr, STRENGTH_STRIDE: tl.constexpr, QUERY_AT: tl.constexpr,
    KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr,
    KEY_COLUMNS: tl.constexpr, DECAY_COLUMNS: tl.constexpr, TAIL: tl.constexpr, TAIL_COLUMNS: tl.constexpr,
    PART_FLOATS: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sequence = program // (HEADS * PARTS)
    head = program // PARTS % HEADS
    part = program % PARTS
    key_head = head % KEY_HEADS if TILED else head // (HEADS // KEY_HEADS)
    number = tl.arange(0, ROWS)
    column = tl.arange(0, PART)
    key_mask = number < KEY
    value_mask = part * PART + column < COLUMNS
    matrix_at = number[:, None] * PART + column[None, :]
    written = out + head * COLUMNS + part * PART + column
    dtype = out.dtype.element_ty
    start, rows, context = sequence_of(sequence, starts, lens)
    if context < 0:
        # Padding: its rows stay finite.
        for index in range(tl.load(starts + sequence + 1) - start):
            row = (start + index).to(tl.int64)
            tl.store(written + row * (HEADS * COLUMNS), tl.zeros((PART,), dtype), value_mask)
    else:
        folding = tl.maximum(rows - TAIL, 0)
        stands = tl.load(folded + sequence)
        slot = tl.load(slots + sequence)
        first = part * PART_FLOATS
        own = pool + line_of(tables, slot, pages, units, 1 + head, page_lines) * LINE + first
        tails = own + KEY * PART
        save, saves = first_save(sequence, stands, save_starts, save_positions)
        upcoming = tl.load(save_positions + save, save < saves, other=-1)
        matrix = tl.load(own + matrix_at, key_mask[:, None] & (stands > 0), other=0.0)

        for position in range(stands, context):
            while upcoming == position:
                into = pool + line_of(save_tables, save, pages, units, 1 + head, page_lines) * LINE + first
                tl.store(into + matrix_at, matrix, key_mask[:, None])
                save += 1
                upcoming = tl.load(save_positions + save, save < saves, other=-1)
            tail = tails + position % TAIL * TAIL_COLUMNS
            key = tl.load(tail + number, key_mask, other=0.0)
            added = tl.load(tail + KEY_COLUMNS + DECAY_COLUMNS + column)
            if BY_KEY:
                decayed = matrix * tl.load(tail + KEY_COLUMNS + number, key_mask, other=0.0)[:, None]
            else:
                decayed = matrix * tl.load(tail + KEY_COLUMNS)
            matrix = _folded_in(decayed, key, added)
        # Places of the tail that were read are written below, perhaps by other threads.
        tl.debug_barrier()

        decay = tl.load(decays + head)
        if BY_KEY:
            bias = tl.load(biases + head * KEY + number, key_mask, other=0.0)
            gate_at = head * KEY + number
        else:
            bias = tl.load(biases + head)
            gate_at = head
        if not DELTA:
            skip = tl.load(skips + head)
        query_at = QUERY_AT + key_head * KEY + number
        key_at = KEY_AT + key_head * KEY + number
        value_at = VALUE_AT + head * COLUMNS + part * PART + column
        query, key, value, gate, strength = _load_row(
            x, gates, strengths, start, rows > 0, query_at, key_at, value_at, gate_at, head, key_mask, value_mask,
            X_STRIDE, GATE_STRIDE, STRENGTH_STRIDE, DELTA, BY_KEY,
        )  # fmt: skip
        for index in range(rows):
            if index <= folding:
                while upcoming == context + index:
                    into = pool + line_of(save_tables, save, pages, units, 1 + head, page_lines) * LINE + first
                    tl.store(into + matrix_at, matrix, key_mask[:, None])
                    save += 1
                    upcoming = tl.load(save_positions + save, save < saves, other=-1)
            if index == folding:
                tl.store(own + matrix_at, matrix, key_mask[:, None])
            # The next row's numbers arrive while this row is computed.
            next_query, next_key, next_value, next_gate, next_strength = _load_row(
                x, gates, strengths, start + index + 1, index + 1 < rows, query_at, key_at, value_at, gate_at, head,
                key_mask, value_mask, X_STRIDE, GATE_STRIDE, STRENGTH_STRIDE, DELTA, BY_KEY,
            )  # fmt: skip
            q, k, v = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
            size = _softplus(gate.to(tl.float32) + bias)
            if DELTA:
                q, k = _unit_lengths(q, k)
                q *= scale
                share = tl.exp(size * decay)
                decayed = matrix * share[:, None] if BY_KEY else matrix * share
                beta = (1.0 / (tl.exp(-strength.to(tl.float32)) + 1.0)).to(strength.dtype).to(tl.float32)
                known, seen = _two_sums(decayed * k[:, None], decayed * q[:, None])
                added = (v - known) * beta
                found = seen + added * tl.sum(k * q, 0)
            else:
                size = tl.minimum(tl.maximum(size, least), most)
                share = tl.exp(size * decay)
                decayed = matrix * share
                added = v * size
                found = tl.sum(decayed * q[:, None], 0) + added * tl.sum(k * q, 0) + v * skip
            matrix = _folded_in(decayed, k, added)
            row = (start + index).to(tl.int64)
            tl.store(written + row * (HEADS * COLUMNS), found.to(dtype), value_mask)
            if index >= folding:
                tail = tails + (context + index) % TAIL * TAIL_COLUMNS
                tl.store(tail + number, k, number < KEY_COLUMNS)
                tl.store(tail + KEY_COLUMNS + DECAY_COLUMNS + column, added)
                if BY_KEY:
                    tl.store(tail + KEY_COLUMNS + number, share, number < DECAY_COLUMNS)
                else:
                    tl.store(tail + KEY_COLUMNS, share)
            query, key, value, gate, strength = next_query, next_key, next_value, next_gate, next_strength


def gated_delta(
    qkv: Tensor,
    gates: Tensor,
    beta: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    shape: DeltaState,
    pool: Tensor,
    units: Tensor,
    step: StepTensors,
    num_seqs: int,
    tail: int,
    out: Tensor,
) -> None:
    """Write the outputs [T, HV * dv] of the gated delta rule, and the states and saves of the step.

    Arguments as of `device.states.StateKernels.gated_delta` and `conv.causal_conv`; units: the heads' from the second
    on. Raises ValueError naming the argument.
    """
    heads = shape.value_heads
    num_gates = heads * shape.key_size if shape.gate_by_key else heads
    check_rows("beta", beta, qkv.dtype)
    if beta.shape != (len(qkv), heads):
        raise ValueError(f"beta must be {[len(qkv), heads]}, is {list(beta.shape)}")
    constants = delta_constants(shape, tail, (qkv.stride(0), gates.stride(0), beta.stride(0)))
    columns = 2 * shape.key_heads * shape.key_size + heads * shape.value_size
    _launch(
        ("qkv", qkv, columns), ("gates", gates, num_gates), beta, decay, dt_bias, decay, shape, pool, units, step,
        num_seqs, out, (0.0, 0.0), shape.key_size**-0.5, constants,
    )  # fmt: skip


def mamba(
    xbc: Tensor,
    dt: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    d: Tensor,
    limits: tuple[float, float],
    shape: MambaState,
    pool: Tensor,
    units: Tensor,
    step: StepTensors,
    num_seqs: int,
    tail: int,
    out: Tensor,
) -> None:
    """Write the outputs [T, H * P] of Mamba-2's recurrence, and the states and saves of the step.

    Arguments as of `device.states.StateKernels.mamba` and `conv.causal_conv`; units: the heads' from the second on.
    Raises ValueError naming the argument.
    """
    check("d", d, (shape.heads,), torch.float32)
    constants = mamba_constants(shape, tail, (xbc.stride(0), dt.stride(0)))
    columns = shape.heads * shape.head_size + 2 * shape.groups * shape.state_size
    _launch(
        ("xbc", xbc, columns), ("dt", dt, shape.heads), dt, decay, dt_bias, d, shape, pool, units, step, num_seqs, out,
        limits, 1.0, constants,
    )  # fmt: skip


def _launch(
    x: tuple[str, Tensor, int],
    gates: tuple[str, Tensor, int],
    strengths: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    skips: Tensor,
    shape: Recurrence,
    pool: Tensor,
    units: Tensor,
    step: StepTensors,
    num_seqs: int,
    out: Tensor,
    limits: tuple[float, float],
    scale: float,
    constants: Mapping[str, Any],
) -> None:
    """Check and launch; x and gates with their names and columns."""
    heads, dtype, rows = shape.num_heads, x[1].dtype, len(out)
    for name, tensor, columns in (x, gates):
        check_rows(name, tensor, *(dtype,) if dtype in DTYPES else DTYPES)
        if tensor.shape != (rows, columns):
            raise ValueError(f"{name} must be {[rows, columns]}, is {list(tensor.shape)}")
    check("decay", decay, (heads,), torch.float32)
    check("dt_bias", dt_bias, (gates[2],), torch.float32)
    check("out", out, (rows, heads * shape.unit.columns), dtype)
    if shape.unit.rows > LARGEST_KEY:
        raise ValueError(f"keys of {shape.unit.rows} numbers: at most {LARGEST_KEY} are possible")
    if rows:
        programs = num_seqs * heads * shape.unit.num_parts
        _recur[programs,](
            x[1], gates[1], strengths, decay, dt_bias, skips, out, pool.view(torch.float32), units,
            *step.step_arguments(), *limits, scale, step.tables.shape[1], pool.shape[1] // LINE_BYTES,
            **constants, **recurrence_options(shape.unit),
        )  # fmt: skip


def delta_constants(shape: DeltaState, tail: int, strides: tuple[int, int, int]) -> dict[str, Any]:
    """Return the constants of the kernel for the delta rule; strides: of rows of qkv, gates and beta."""
    keys = shape.key_heads * shape.key_size
    return {
        "DELTA": True, "BY_KEY": shape.gate_by_key, "TILED": shape.tiled, "KEY_HEADS": shape.key_heads,
        "X_STRIDE": strides[0], "GATE_STRIDE": strides[1], "STRENGTH_STRIDE": strides[2],
        "QUERY_AT": 0, "KEY_AT": keys, "VALUE_AT": 2 * keys, **_unit_constants(shape, tail),
    }  # fmt: skip


def mamba_constants(shape: MambaState, tail: int, strides: tuple[int, int]) -> dict[str, Any]:
    """Return the constants of the kernel for Mamba-2; strides: of rows of xbc and dt."""
    keys = shape.heads * shape.head_size
    return {
        "DELTA": False, "BY_KEY": False, "TILED": False, "KEY_HEADS": shape.groups,
        "X_STRIDE": strides[0], "GATE_STRIDE": strides[1], "STRENGTH_STRIDE": strides[1],
        "QUERY_AT": keys + shape.groups * shape.state_size, "KEY_AT": keys, "VALUE_AT": 0,
        **_unit_constants(shape, tail),
    }  # fmt: skip


def _unit_constants(shape: Recurrence, tail: int) -> dict[str, int]:
    unit = shape.unit
    return {
        "HEADS": shape.num_heads, "KEY": unit.rows, "COLUMNS": unit.columns, "PARTS": unit.num_parts,
        "PART": unit.part_columns, "ROWS": triton.next_power_of_2(unit.padded_rows), "KEY_COLUMNS": unit.padded_rows,
        "DECAY_COLUMNS": unit.decay_columns, "TAIL": tail, "TAIL_COLUMNS": unit.tail_columns,
        "PART_FLOATS": unit.part_floats(tail), "LINE": _LINE,
    }  # fmt: skip


def recurrence_options(unit: HeadUnit) -> dict[str, Any]:
    """Return the launch options. The order of sums hangs on them: they are the same for all steps of a model.

    One warp where its registers suffice: of several, each row's sums wait for all. Products and sums may fuse, as no
    expression that must give the same bits is written twice, except `_folded_in`, which says how it rounds.
    """
    numbers = triton.next_power_of_2(unit.padded_rows) * unit.part_columns * (1 if unit.decays == 1 else 2)
    return {"num_warps": max(1, numbers // _WARP_NUMBERS), "num_stages": 1, "enable_fp_fusion": True}


_MODELS: dict[str, Recurrence] = {
    "qwen3.5": DeltaState(16, 32, 128, 128),
    "qwen3.5 tiled": DeltaState(16, 48, 128, 128, tiled=True),
    "kimi": DeltaState(32, 32, 128, 128, gate_by_key=True),
    "granite": MambaState(128, 64, 128, 1),
    "nemotron": MambaState(64, 64, 128, 8),
    "falcon-h1": MambaState(24, 64, 256, 1),
}


def variants() -> list[Variant]:
    """Return those of some models, for a tail of one row and of four."""
    found = []
    for name, shape in _MODELS.items():
        for dtype in DTYPES.values():
            for tail in (1, 4):
                quick = (dtype, tail) == ("bf16", 1) and name in ("qwen3.5", "granite")
                found.append(_variant(f"{name} {dtype} tail{tail}", shape, dtype, tail, quick))
    return found


def _variant(name: str, shape: Recurrence, dtype: str, tail: int, quick: bool) -> Variant:
    arguments = dict.fromkeys(("x", "gates", "strengths"), f"*{dtype}")
    arguments |= dict.fromkeys(("decays", "biases", "skips"), "*fp32") | {"out": f"*{dtype}", "pool": "*fp32"}
    arguments |= {"units": "*i32"} | {each: kind for each, kind in STEP_POINTERS.items() if each != "owners"}
    arguments |= dict.fromkeys(("least", "most", "scale"), "fp32") | dict.fromkeys(("pages", "page_lines"), "i32")
    unit, heads = shape.unit, shape.num_heads
    if isinstance(shape, DeltaState):
        columns = 2 * shape.key_heads * unit.rows + heads * unit.columns
        gates = heads * unit.rows if shape.gate_by_key else heads
        constants, operation = delta_constants(shape, tail, (columns, gates, heads)), "gated_delta"
    else:
        columns = heads * unit.columns + 2 * shape.groups * unit.rows
        constants, operation = mamba_constants(shape, tail, (columns, heads)), "mamba"
    found = variant(f"{operation} {name}", _recur, arguments, constants, recurrence_options(unit), quick)
    return found if unit.decays == 1 else replace(found, no_spills=False)  # four bytes, with a tail on sm_80
