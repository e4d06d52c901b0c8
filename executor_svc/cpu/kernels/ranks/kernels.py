"""Kernels of exchanges between ranks: give rows, arrive, and take what all have given once they have arrived."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.driver import pause
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.norm import each_piece
from executor_svc.cpu.kernels.ranks.memory import LINE

_I64 = ir.IntType(64)


def give_rows(code: Code, dtype: Dtype, width: int) -> str:
    """Add the kernel that copies rows to the half of the next exchange; returns its name.

    Items: one for each row. Arguments: rows; x [rows, width]; where the first row goes in the first half, the bytes of
    a half, and those from row to row; the number of the last exchange.
    """
    size = ITEM_BYTES[dtype]

    def body(emit: Emitter, item: Int, _: Int, __: Int, x: Int, base: Int, half: Int, stride: Int, number: Int) -> None:
        into = base + _parity(emit.load_int(number) + 1) * half + item * stride
        _copy(emit, dtype, width, x + item * (width * size), into)

    return code.kernel(f"rank_give_{dtype}_{width}", 6, body)


def give_own_rows(code: Code, dtype: Dtype, width: int) -> str:
    """Add the kernel that copies the rows whose token is this rank's; returns its name.

    Items: one for each row. Arguments: as those of `give_rows`, then token_ids [rows] int64, the first token of this
    rank and how many it has.
    """
    size = ITEM_BYTES[dtype]

    def body(
        emit: Emitter,
        item: Int,
        _: Int,
        __: Int,
        x: Int,
        base: Int,
        half: Int,
        stride: Int,
        number: Int,
        token_ids: Int,
        first: Int,
        count: Int,
    ) -> None:
        place = emit.load_int(token_ids + item * 8) - first
        is_own = emit.builder.icmp_unsigned("<", place.value, count.value)
        into = base + _parity(emit.load_int(number) + 1) * half + item * stride
        emit.when(is_own, lambda: _copy(emit, dtype, width, x + item * (width * size), into))

    return code.kernel(f"rank_give_own_{dtype}_{width}", 9, body)


def own_ids(code: Code) -> str:
    """Add the kernel that makes tokens rows of this rank's table, 0 for those of others; returns its name.

    Items: one for each token. Arguments: rows; token_ids [rows] int64; ids [rows] int64; first, count.
    """

    def body(emit: Emitter, item: Int, _: Int, __: Int, token_ids: Int, ids: Int, first: Int, count: Int) -> None:
        place = emit.load_int(token_ids + item * 8) - first
        is_own = emit.builder.icmp_unsigned("<", place.value, count.value)
        _store_int(emit, place.where(is_own, 0), ids + item * 8)

    return code.kernel("rank_own_ids", 5, body)


def arrive(code: Code) -> str:
    """Add the kernel that says that this rank has given its part of the next exchange; returns its name.

    Items: one. Arguments: rows; the number of the last exchange, which it counts up; the place of this rank's arrivals.
    """

    def body(emit: Emitter, _: Int, __: Int, ___: Int, number: Int, arrived: Int) -> None:
        following = emit.load_int(number) + 1
        _store_int(emit, following, number)
        emit.builder.store_atomic(following.value, emit.pointer(arrived, _I64), "release", 8)

    return code.kernel("rank_arrive", 3, body)


def take_sums(code: Code, num_ranks: int, dtype: Dtype, width: int, has_bias: bool) -> str:
    """Add the kernel y = the sum of all ranks' rows in their order, plus bias, rounded once; returns its name.

    Items: one for each row. Arguments: rows; the first half, the bytes of a half and of a rank in it; the number of
    this exchange; the arrivals; the place of a failure; y [rows, width]; bias [width] in dtype, or 0.
    """
    size = ITEM_BYTES[dtype]

    def body(
        emit: Emitter,
        item: Int,
        _: Int,
        __: Int,
        base: Int,
        half: Int,
        rank_bytes: Int,
        number: Int,
        arrivals: Int,
        failed: Int,
        y: Int,
        bias: Int,
    ) -> None:
        exchange = emit.load_int(number)
        _wait(emit, num_ranks, exchange, arrivals, failed)
        row = base + _parity(exchange) * half + item * (width * 4)

        def piece(offset: Int, count: int) -> None:
            total: Vec = emit.load(row + offset * 4, "float32", count)
            for rank in range(1, num_ranks):
                total = total + emit.load(row + rank_bytes * rank + offset * 4, "float32", count)
            if has_bias:
                total = total + emit.load(bias + offset * size, dtype, count)
            emit.store(total, y + (item * width + offset) * size, dtype, count)

        each_piece(emit, width, piece)

    return code.kernel(f"rank_sums_{num_ranks}_{dtype}_{width}_{has_bias}", 9, body)


def take_rows(code: Code, num_ranks: int, dtype: Dtype, width: int) -> str:
    """Add the kernel y = the rows that ranks have given, one of them each; returns its name.

    Items: one for each row. Arguments: rows; the first half, the bytes of a half; the number of this exchange; the
    arrivals; the place of a failure; y [rows, width], or 0: wait only.
    """
    size = ITEM_BYTES[dtype]

    def body(
        emit: Emitter,
        item: Int,
        _: Int,
        __: Int,
        base: Int,
        half: Int,
        number: Int,
        arrivals: Int,
        failed: Int,
        y: Int,
    ) -> None:
        exchange = emit.load_int(number)
        _wait(emit, num_ranks, exchange, arrivals, failed)
        place = item * (width * size)
        source = base + _parity(exchange) * half + place
        reads = emit.builder.not_(y.equals(0))
        emit.when(reads, lambda: _copy(emit, dtype, width, source, y + place))

    return code.kernel(f"rank_rows_{num_ranks}_{dtype}_{width}", 7, body)


def _wait(emit: Emitter, num_ranks: int, exchange: Int, arrivals: Int, failed: Int) -> None:
    """Wait until all ranks have arrived at an exchange, or one has failed."""
    for rank in range(num_ranks):
        _wait_for(emit, exchange, arrivals + rank * LINE, failed)


def _wait_for(emit: Emitter, exchange: Int, arrived: Int, failed: Int) -> None:
    builder = emit.builder
    check, spin, after = (builder.function.append_basic_block(name) for name in ("check", "spin", "arrived"))
    before = builder.block
    builder.branch(check)
    builder.position_at_end(check)
    spins = builder.phi(_I64)
    spins.add_incoming(_I64(0), before)
    seen = builder.load_atomic(emit.pointer(arrived, _I64), "acquire", 8)
    failure = builder.load_atomic(emit.pointer(failed, _I64), "monotonic", 8)
    missing: Any = builder.and_(
        builder.icmp_signed("<", seen, exchange.value), builder.icmp_signed("==", failure, _I64(0))
    )
    builder.cbranch(missing, spin, after)
    builder.position_at_end(spin)
    more = builder.add(spins, _I64(1))
    pause(builder, more)
    spins.add_incoming(more, builder.block)
    builder.branch(check)
    builder.position_at_end(after)


def _parity(number: Int) -> Int:
    return number % 2


def _copy(emit: Emitter, dtype: Dtype, width: int, source: Int, target: Int) -> None:
    size = ITEM_BYTES[dtype]

    def piece(offset: Int, count: int) -> None:
        emit.store(emit.load(source + offset * size, dtype, count), target + offset * size, dtype, count)

    each_piece(emit, width, piece)


def _store_int(emit: Emitter, value: Int, address: Int) -> None:
    emit.builder.store(value.value, emit.pointer(address, _I64))
