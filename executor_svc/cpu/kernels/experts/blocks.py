"""Routed rows by expert, in blocks: their order, and a product for each block with its expert's weight.

A block is some rows of one expert. How many there are is known only after the choice, so launches over blocks take
their number of items from memory (`codegen.team.KernelLaunch.counted_at`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import Emitter, Int, Vec
from executor_svc.cpu.kernels.panel_layout import ROWS_AT_ONCE
from executor_svc.cpu.kernels.quantized.files.panels import FilePanels
from executor_svc.device.ranks import Share

_I64 = ir.IntType(64)
_WORD = 8
BLOCK_WORDS = 4
"""Of a block: its expert, its first routed row, its rows, and the expert of the block behind it."""
ARGUMENT_WORDS = 5
"""Of a kernel's argument: `BlockArgument.words`."""


def most_blocks(num_routed: int, num_experts: int) -> int:
    """Return the most blocks that so many routed rows can have."""
    return min(num_routed, num_experts + num_routed // ROWS_AT_ONCE)


def _store(emit: Emitter, value: Int, address: Int) -> None:
    emit.builder.store(value.value, emit.pointer(address, _I64))


def _add(emit: Emitter, address: Int, value: Int | int) -> Int:
    """Add to an integer in memory; return what it was."""
    before = emit.load_int(address)
    _store(emit, before + value, address)
    return before


COUNTS = 3
"""Numbers that `group` writes: of blocks, of routed rows, and of pairs of these."""


def group(code: Code, num_experts: int, num_chosen: int, share: Share) -> str:
    """Add the kernel that puts routed rows into the order of their experts, within an expert that of tokens.

    share: of a rank, of whose experts alone there are rows. One item. Arguments: tokens T, ids [T, K] int64; all
    written: places [T, K] int64, the routed row of each choice, -1 for those of other ranks; sources [T * K] int64, the
    token of each routed row; blocks [most_blocks, BLOCK_WORDS] int64; counts [COUNTS] int64; firsts [E] int64, scratch.
    Returns its name.
    """

    def body(
        emit: Emitter, _: Int, __: Int, tokens: Int, ids: Int, places: Int, sources: Int, blocks: Int, number: Int,
        firsts: Int,
    ) -> None:  # fmt: skip
        store, add = partial(_store, emit), partial(_add, emit)

        def count(choice: Int, _: list[Vec]) -> None:
            add(firsts + emit.load_int(ids + choice * _WORD) * _WORD, 1)

        def divide(expert: Int, _: list[Vec]) -> None:
            rows, first = emit.load_int(firsts + expert * _WORD), emit.load_int(sources)
            store(first, firsts + expert * _WORD)
            store(first + rows, sources)

            def block(at: Int, _: list[Vec]) -> None:
                index = add(number, 1)
                record = blocks + index * (BLOCK_WORDS * _WORD)
                own = expert // share.size
                words = own, first + at, (rows - at).least(ROWS_AT_ONCE), own
                for word, value in enumerate(words):
                    store(value, record + word * _WORD)
                before = record - _WORD  # the last word of the block before
                emit.when(emit.integer(0).less(index), lambda: store(own, before))

            emit.loop(0, rows, ROWS_AT_ONCE, block)

        def place(choice: Int, _: list[Vec]) -> None:
            expert = emit.load_int(ids + choice * _WORD)

            def put() -> None:
                routed = add(firsts + expert * _WORD, 1)
                store(routed, places + choice * _WORD)
                store(choice // num_chosen, sources + routed * _WORD)

            if share.size == 1:
                put()
                return
            store(emit.integer(-1), places + choice * _WORD)
            emit.when((expert % share.size).equals(share.rank), put)

        emit.loop(0, num_experts, 1, lambda expert, _: store(emit.integer(0), firsts + expert * _WORD))
        emit.loop(0, tokens * num_chosen, 1, count)
        store(emit.integer(0), number)
        store(emit.integer(0), sources)  # until the rows are placed, their number so far
        emit.loop(share.rank, num_experts, share.size, divide)
        placed = emit.load_int(sources)
        store(placed, number + _WORD)
        store((placed + 1) // 2, number + 2 * _WORD)
        emit.loop(0, tokens * num_chosen, 1, place)

    return code.kernel(f"group_{num_experts}_{num_chosen}_{share.rank}_of_{share.size}", 7, body)


def head_blocks(code: Code, num_heads: int) -> str:
    """Add the kernel that makes blocks of rows by head, those of all tokens for each head; returns its name.

    One item. Arguments: tokens T; all written: blocks [num_heads * ceil(T / ROWS_AT_ONCE), BLOCK_WORDS] int64, with
    heads in the place of experts; the number of blocks.
    """

    def body(emit: Emitter, _: Int, __: Int, tokens: Int, blocks: Int, number: Int) -> None:
        store = partial(_store, emit)
        each = (tokens + (ROWS_AT_ONCE - 1)) // ROWS_AT_ONCE
        store(each * num_heads, number)

        def head(index: Int, _: list[Vec]) -> None:
            def block(at: Int, _: list[Vec]) -> None:
                first, following = at * ROWS_AT_ONCE, (index + 1).least(num_heads - 1)
                rows = (tokens - first).least(ROWS_AT_ONCE)
                words = index, index * tokens + first, rows, following.where((at + 1).equals(each), index)
                record = blocks + (index * each + at) * (BLOCK_WORDS * _WORD)
                for word, value in enumerate(words):
                    store(value, record + word * _WORD)

            emit.loop(0, each, 1, block)

        emit.loop(0, num_heads, 1, head)

    return code.kernel(f"head_blocks_{num_heads}", 3, body)


@dataclass(frozen=True, slots=True)
class BlockArgument:
    """An argument of a kernel that is made for each block."""

    value: int
    """For the first block, or where the following say nothing else."""
    row_bytes: int = 0
    """From a routed row to the next."""
    block_bytes: int = 0
    """From a block to the next."""
    by_expert: int = 0
    """Address of a table [E] int64 that stands for the value."""
    by_next_expert: int = 0
    """Likewise, for the expert of the next block."""

    @property
    def words(self) -> tuple[int, int, int, int, int]:
        return self.value, self.row_bytes, self.block_bytes, self.by_expert, self.by_next_expert


WEIGHT = 2
"""Of the arguments of a product: its weight."""


def each_block(code: Code, num_arguments: int, file: FilePanels | None = None) -> str:
    """Add the kernel that runs another one for the rows of a block; returns its name.

    file: the other one is a product whose weight lies in a file, and whose items are the weight's panels: each is made
    before, in memory of the thread. There is one more argument then, that memory, of `panel_bytes` for each thread, and
    behind the other one's arguments, made as they are, is where the weight's scales are.

    num_arguments: of the other one, whose first is the number of rows. Items: `groups` for each block. Arguments: a
    count that is not read, the other one's address, its other arguments [num_arguments - 1, ARGUMENT_WORDS] int64, then
    as of `codegen.team.KernelLaunch` its share, groups and least; blocks.
    """

    def body(
        emit: Emitter, item: Int, thread: Int, _: Int, kernel: Int, arguments: Int, share: Int, groups: Int, least: Int,
        blocks: Int, *memory: Int,
    ) -> None:  # fmt: skip
        builder = emit.builder
        block, group = item // groups, item % groups
        record = blocks + block * (BLOCK_WORDS * _WORD)
        expert, first, rows, following = (emit.load_int(record + word * _WORD) for word in range(BLOCK_WORDS))
        made = builder.alloca(_I64, size=num_arguments)

        def put(index: int, value: Int) -> None:
            builder.store(value.value, builder.gep(made, [ir.Constant(_I64, index)]))

        put(0, rows)
        values = []
        for index in range(1, num_arguments + (file is not None)):
            place = arguments + (index - 1) * (ARGUMENT_WORDS * _WORD)
            row_bytes, block_bytes, own, other = (emit.load_int(place + word * _WORD) for word in range(1, 5))
            # Where the value is: in a table, or here. So there is no branch.
            at = (own + expert * _WORD).where(builder.not_(own.equals(0)), place)
            at = (other + following * _WORD).where(builder.not_(other.equals(0)), at)
            values.append(emit.load_int(at) + first * row_bytes + block * block_bytes)
        if file is not None:
            own_panel, scales = memory[0] + thread * file.panel_bytes, values.pop()
            file.make(code, emit, values[WEIGHT - 1], scales, group, own_panel)
            values[WEIGHT - 1] = own_panel - group * file.panel_bytes
        for index, value in enumerate(values, 1):
            put(index, value)
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 3).as_pointer()
        chunks = ((rows + (share - 1)) // share).where(builder.not_(rows.less(least)), 0)

        def chunk(index: Int, _: list[Vec]) -> None:
            inner = index * groups + group
            builder.call(
                builder.inttoptr(kernel.value, kind), [builder.ptrtoint(made, _I64), inner.value, thread.value]
            )

        emit.loop(0, chunks, 1, chunk)

    if file is None:
        return code.kernel(f"each_block_{num_arguments}", 7, body)
    return code.kernel(f"each_block_{num_arguments}_{file.key}", 8, body)
