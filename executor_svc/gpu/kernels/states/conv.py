"""Causal depthwise convolutions over a sequence's own rows, with a ring of its last inputs in the pages of its state.

Outputs of all tokens are computed at once: a token reads the rows before it in the step, and those of earlier steps in
the ring. A second launch writes saves and the step's last rows to the ring, when no program reads it any more.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.activation import silu
from executor_svc.gpu.kernels.rows import DTYPES, check, check_rows, options, variant
from executor_svc.gpu.kernels.states.step import (
    LINE_BYTES,
    STEP_POINTERS,
    StepTensors,
    first_save,
    line_of,
    sequence_of,
)
from executor_svc.gpu.kernels.variant import Variant

_TOKENS, _CHANNELS = 8, 128
_RING_CHANNELS = 256
_WIDTHS = {"lfm2": (2048, 3, False), "qwen3.5": (8192, 4, False), "granite": (8448, 4, True)}
"""Channels, taps and whether there are a bias and silu, of variants compiled ahead of time."""


@triton.jit(do_not_specialize=["num_tokens", "pages", "page_lines"])
def _convolve(
    x, weight, bias, out, pool, units, starts, lens, slots, owners, tables, num_tokens, pages, page_lines,
    COLUMNS: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, BIAS: tl.constexpr,
    SILU: tl.constexpr, LINE: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = (COLUMNS + CHANNELS - 1) // CHANNELS
    dtype = x.dtype.element_ty
    program = tl.program_id(0)
    token = program // parts * TOKENS + tl.arange(0, TOKENS)
    channel = program % parts * CHANNELS + tl.arange(0, CHANNELS)
    channels = channel < COLUMNS
    owner = tl.load(owners + token, token < num_tokens, other=-1)
    live = owner >= 0
    start = tl.load(starts + owner, live, other=0)
    context = tl.load(lens + owner, live, other=0) - tl.load(starts + owner + 1, live, other=0) + start
    slot = tl.load(slots + owner, live, other=0).to(tl.int64)
    page = tl.load(tables + slot * pages + tl.load(units), live, other=0).to(tl.int64)
    ring = (page * page_lines + tl.load(units + 1)) * LINE
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(WIDTH):
        row = token - (WIDTH - 1 - tap)
        in_step = live & (row >= start)
        position = context + row - start
        in_ring = live & (row < start) & (position >= 0)
        new = tl.load(
            x + row.to(tl.int64)[:, None] * STRIDE + channel[None, :], in_step[:, None] & channels[None, :], other=0.0
        )
        place = ring + tl.where(in_ring, position % RING, 0) * COLUMNS
        old = tl.load(pool + place[:, None] + channel[None, :], in_ring[:, None] & channels[None, :], other=0.0)
        factor = tl.load(weight + tap * COLUMNS + channel, channels, other=0.0).to(tl.float32)
        value = tl.where(in_step[:, None], new, old).to(tl.float32)
        total += value * factor[None, :]
    if BIAS:
        total += tl.load(bias + channel, channels, other=0.0).to(tl.float32)[None, :]
    found = total.to(dtype)
    if SILU:
        found = silu(found.to(tl.float32)).to(dtype)
    there = (token < num_tokens)[:, None] & channels[None, :]
    tl.store(out + token.to(tl.int64)[:, None] * COLUMNS + channel[None, :], found, there)


@triton.jit(do_not_specialize=["pages", "page_lines"])
def _write_rings(
    x, pool, units, starts, lens, slots, folded, tables, save_starts, save_positions, save_tables, pages, page_lines,
    COLUMNS: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, TAIL: tl.constexpr,
    LINE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = (COLUMNS + CHANNELS - 1) // CHANNELS
    program = tl.program_id(0)
    sequence = program // parts
    channel = program % parts * CHANNELS + tl.arange(0, CHANNELS)
    channels = channel < COLUMNS
    start, rows, context = sequence_of(sequence, starts, lens)
    if rows > 0:
        end = context + rows
        own = pool + line_of(tables, tl.load(slots + sequence), pages, units, 0, page_lines) * LINE + channel
        after = context + tl.maximum(rows - TAIL, 0)
        first, saves = first_save(sequence, tl.load(folded + sequence), save_starts, save_positions)
        for save in range(first, saves):
            position = tl.load(save_positions + save)
            if position <= after:
                into = pool + line_of(save_tables, save, pages, units, 0, page_lines) * LINE + channel
                for each in range(tl.maximum(position - WIDTH + 1, 0), position):
                    at = each % RING * COLUMNS
                    row = (start + each - context).to(tl.int64)
                    new = tl.load(x + row * STRIDE + channel, channels & (each >= context), other=0.0)
                    old = tl.load(own + at, channels & (each < context), other=0.0)
                    tl.store(into + at, tl.where(each >= context, new, old), channels)
        tl.debug_barrier()
        for each in range(tl.maximum(context, end - RING), end):
            row = (start + each - context).to(tl.int64)
            tl.store(own + each % RING * COLUMNS, tl.load(x + row * STRIDE + channel, channels), channels)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    pool: Tensor,
    units: Tensor,
    step: StepTensors,
    num_seqs: int,
    tail: int,
    out: Tensor,
) -> None:
    """Write the convolution of x [T, C] to out [T, C], zeros for padding, and the rings and saves of the step.

    Args:
        x: columns of wider rows, perhaps.
        weight: [W, C], the last row multiplies the token's own input. bias: [C].
        pool: [pages, bytes of a page] uint8.
        units: [units, 2] int32: of each unit, the page of a state, and the line in it; the ring is the first.
        step: with num_seqs sequences, and T tokens.

    Raises ValueError naming the argument.
    """
    rows, columns = out.shape
    width = weight.shape[0]
    check_rows("x", x, *DTYPES)
    check("weight", weight, (width, columns), x.dtype)
    check("out", out, tuple(x.shape), x.dtype)
    if bias is not None:
        check("bias", bias, (columns,), x.dtype)
    if not rows:
        return
    numbers = pool.view(x.dtype)
    line = LINE_BYTES // x.element_size()
    sizes = step.tables.shape[1], pool.shape[1] // LINE_BYTES
    constants = conv_constants(columns, x.stride(0), width, tail, line) | {"BIAS": bias is not None, "SILU": silu}
    programs = -(-rows // _TOKENS) * -(-columns // _CHANNELS)
    _convolve[programs,](
        x, weight, weight if bias is None else bias, out, numbers, units, step.starts, step.lens, step.slots,
        step.owners, step.tables, rows, *sizes, **constants, TOKENS=_TOKENS, CHANNELS=_CHANNELS, **_conv_options(),
    )  # fmt: skip
    constants = conv_constants(columns, x.stride(0), width, tail, line) | {"TAIL": tail}
    _write_rings[num_seqs * -(-columns // _RING_CHANNELS),](
        x, numbers, units, *step.step_arguments(), *sizes, **constants, CHANNELS=_RING_CHANNELS,
        **options(_RING_CHANNELS),
    )  # fmt: skip


def conv_constants(columns: int, stride: int, width: int, tail: int, line: int) -> dict[str, Any]:
    """Return the constants of both kernels; line: numbers of a line of the pool."""
    return {"COLUMNS": columns, "STRIDE": stride, "WIDTH": width, "RING": width - 1 + tail, "LINE": line}


def _conv_options() -> dict[str, Any]:
    return options(_TOKENS * _CHANNELS)


def variants() -> list[Variant]:
    """Return those of some models, for a tail of one row and of four."""
    found = []
    for name, (columns, width, biased) in _WIDTHS.items():
        for dtype, size in (("bf16", 2), ("fp32", 4)):
            for tail in (1, 4):
                constants = conv_constants(columns, columns, width, tail, LINE_BYTES // size)
                title, quick = f"{name} {dtype} tail{tail}", (name, dtype, tail) == ("qwen3.5", "bf16", 1)
                found += [
                    _convolving(title, dtype, constants, biased, name != "lfm2", quick),
                    _writing(title, dtype, constants | {"TAIL": tail}),
                ]
    return found


_PLACES = {"pages": "i32", "page_lines": "i32"}


def _convolving(name: str, dtype: str, constants: dict[str, Any], biased: bool, silu: bool, quick: bool) -> Variant:
    arguments = dict.fromkeys(("x", "weight", "bias", "out", "pool"), f"*{dtype}") | {"units": "*i32"}
    arguments |= {each: STEP_POINTERS[each] for each in ("starts", "lens", "slots", "owners", "tables")}
    arguments |= {"num_tokens": "i32", **_PLACES}
    constants = constants | {"BIAS": biased, "SILU": silu, "TOKENS": _TOKENS, "CHANNELS": _CHANNELS}
    return variant(f"causal_conv {name}", _convolve, arguments, constants, _conv_options(), quick)


def _writing(name: str, dtype: str, constants: dict[str, Any]) -> Variant:
    step = {each: kind for each, kind in STEP_POINTERS.items() if each != "owners"}
    arguments = {"x": f"*{dtype}", "pool": f"*{dtype}", "units": "*i32", **step, **_PLACES}
    constants = constants | {"CHANNELS": _RING_CHANNELS}
    return variant(f"write_rings {name}", _write_rings, arguments, constants, options(_RING_CHANNELS))
