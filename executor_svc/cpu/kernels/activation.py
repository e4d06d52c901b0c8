"""Gated activations, and scaling and softcap of logits. Rounded where transformers rounds."""

from __future__ import annotations

import math
from typing import Literal

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.functions import exp, tanh
from executor_svc.cpu.kernels.norm import each_piece

Activation = Literal["silu", "gelu_tanh"]

ROWS_AT_ONCE = 2
_GELU_SCALE = 2 * math.sqrt(2 / math.pi)
_GELU_CUBE = 0.044715


def gated(code: Code, activation: Activation, dtype: Dtype, width: int) -> str:
    """Add the kernel y = activation(gate) * up; returns its name.

    Items: one for each ROWS_AT_ONCE rows. Arguments: rows, gate_up [rows, 2 * width], y [rows, width].
    """
    size, activate = ITEM_BYTES[dtype], {"silu": _silu, "gelu_tanh": _gelu_tanh}[activation]

    def body(emit: Emitter, item: Int, _: Int, rows: Int, gate_up: Int, y: Int) -> None:
        def row(index: Int, _: list[Vec]) -> None:
            start, into = gate_up + index * (2 * width * size), y + index * (width * size)

            def piece(offset: Int, count: int) -> None:
                gate = emit.load(start + offset * size, dtype, count)
                up = emit.load(start + (offset + width) * size, dtype, count)
                emit.store(activate(gate).rounded(dtype) * up, into + offset * size, dtype, count)

            each_piece(emit, width, piece)

        first = item * ROWS_AT_ONCE
        emit.loop(first, (first + ROWS_AT_ONCE).least(rows), 1, row)

    return code.kernel(f"{activation}_{dtype}_{width}", 3, body)


def finish_logits(code: Code, dtype: Dtype, vocab_size: int, divisor: float, cap: float | None) -> str:
    """Add the kernel x = cap * tanh(x / divisor / cap) on logits in place, rounded to dtype after each operation.

    Items: one for each row. Arguments: rows, x [rows, vocab_size] float32. Returns its name.
    """

    def body(emit: Emitter, item: Int, _: Int, rows: Int, x: Int) -> None:
        start = x + item * (vocab_size * 4)

        def piece(offset: Int, count: int) -> None:
            value = emit.load(start + offset * 4, "float32", count)
            if divisor != 1.0:
                value = (value / divisor).rounded(dtype)
            if cap is not None:
                value = (tanh((value / cap).rounded(dtype)).rounded(dtype) * cap).rounded(dtype)
            emit.store(value, start + offset * 4, "float32", count)

        each_piece(emit, vocab_size, piece)

    return code.kernel(f"finish_logits_{dtype}_{vocab_size}_{divisor}_{cap}", 2, body)


def _silu(gate: Vec) -> Vec:
    return gate / (exp(gate * -1.0) + 1.0)


def _gelu_tanh(gate: Vec) -> Vec:
    """The tanh form of gelu (Hendrycks and Gimpel, 2016), x / 2 * (1 + tanh(u)), as x / (1 + exp(-2u))."""
    exponent = (gate * gate * (-_GELU_SCALE * _GELU_CUBE) - _GELU_SCALE) * gate
    return gate / (exp(exponent) + 1.0)
