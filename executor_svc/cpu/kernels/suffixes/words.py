"""What code over integers in memory needs beside `Emitter`: variables, loops that end by a condition, arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.emit import Emitter, Int

_I32, _I64 = ir.IntType(32), ir.IntType(64)


class Variable:
    """An integer that code changes; to be made outside of loops."""

    def __init__(self, emit: Emitter, value: Int | int) -> None:
        self._emit = emit
        with emit.builder.goto_entry_block():
            self._place = emit.builder.alloca(_I64)
        self.set(value)

    @property
    def value(self) -> Int:
        return Int(self._emit, self._emit.builder.load(self._place))

    def set(self, value: Int | int) -> None:
        self._emit.builder.store(self._emit.integer(value).value, self._place)


class Word:
    """An int64 in memory."""

    def __init__(self, emit: Emitter, address: Int) -> None:
        self._emit = emit
        self._address = address

    @property
    def value(self) -> Int:
        return self._emit.load_int(self._address)

    def set(self, value: Int | int) -> None:
        emit = self._emit
        emit.builder.store(emit.integer(value).value, emit.pointer(self._address, _I64))


class Array:
    """An array of int32 in memory."""

    def __init__(self, emit: Emitter, address: Int) -> None:
        self._emit = emit
        self._address = address

    def __getitem__(self, index: Int) -> Int:
        return self._emit.load_int32(self._address + index * 4)

    def __setitem__(self, index: Int, value: Int | int) -> None:
        emit = self._emit
        number = emit.builder.trunc(emit.integer(value).value, _I32)
        emit.builder.store(number, emit.pointer(self._address + index * 4, _I32))


def fields(emit: Emitter, address: Int, count: int) -> list[Word]:
    """Return consecutive fields."""
    return [Word(emit, address + 8 * index) for index in range(count)]


@contextmanager
def repeat_while(emit: Emitter, condition: Callable[[], Any]) -> Iterator[Callable[[], None]]:
    """Emit the block as a loop's body, before each run of which the condition is computed; yields its `break`.

    Code behind a break in the same block is not reached, and must not be written.
    """
    builder = emit.builder
    header, inside, after = (builder.append_basic_block(name) for name in ("while", "inside", "behind"))
    builder.branch(header)
    builder.position_at_end(header)
    builder.cbranch(condition(), inside, after)
    builder.position_at_end(inside)

    def leave() -> None:
        builder.branch(after)

    yield leave
    builder.branch(header)
    builder.position_at_end(after)


def both(emit: Emitter, left: Any, right: Any) -> Any:
    """Return the condition that both hold."""
    return emit.builder.and_(left, right)
