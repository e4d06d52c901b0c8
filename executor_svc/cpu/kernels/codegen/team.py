"""Threads that run kernels: a recorded list of launches with one call.

A launch has items, which threads take one by one, so a thread that lost its core to another process delays only its
current item: thread t of n takes items t, t + n, t + 2 n, ..., and then those of others that are left. Each share has a
counter in a cache line of its own, which cores would otherwise pull from each other at every item. The next launch
begins when all items of the last are done, or taken if it joins that one. An item's bits do not depend on the thread
that computes it. The threads are OpenMP's, the same that PyTorch uses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir
from numpy.typing import NDArray

from executor_svc.cpu.kernels.codegen.compiled import Code, symbol

_I64, _VOID = ir.IntType(64), ir.VoidType()
_LINE = 8
"""Fields of a cache line."""
_KERNEL, _ARGUMENTS, _COUNTER, _ITEMS_AT, _AWAITED_AT, _GROUPS, _ITEMS, _AWAITED = range(_LINE)
_DONE, _TAKEN = _LINE, 2 * _LINE
"""The first fields of the second line, and of those of the threads' shares."""
_SPINS_BEFORE_YIELD = 2000
_OPENMP = "libgomp.so.1"
_MAX_ARGUMENTS = 2 * _LINE
_AHEAD = 2
"""Launches by which a thread prefetches what the driver and the kernel read: weights have pushed it out of the caches
since the last run."""


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel with its arguments. Its number of items is ceil(count / share) * groups; 0 where count < least."""

    kernel: str
    count: str
    """Name of the count, which is the kernel's first argument: rows, or the tiles of a step's attention."""
    share: int
    groups: int
    arguments: tuple[int, ...]
    """Addresses and sizes, after the count."""
    least: int = 0
    joins: bool = False
    """Whether its items may run while those of the launch before still do; what follows waits for both."""
    times: int = 1
    """Factor of the count: rows of the step that are there so many times, once for each expert that they chose."""
    counted_at: int = 0
    """Address of a number that a launch before it writes, in the place of ceil(count / share) where that is not 0.

    Nothing else of the program may write it: threads that are late read it when others are launches ahead."""


class LaunchProgram:
    """Consecutive launches; each run sets their counts."""

    def __init__(self, team: Team, launches: Sequence[KernelLaunch]) -> None:
        self._team = team
        self._counts = tuple(dict.fromkeys(launch.count for launch in launches))
        self._which = np.array([self._counts.index(launch.count) for launch in launches], np.int64)
        self._share = np.array([launch.share for launch in launches], np.int64)
        self._least = np.array([launch.least for launch in launches], np.int64)
        self._groups = np.array([launch.groups for launch in launches], np.int64)
        self._times = np.array([launch.times for launch in launches], np.int64)
        self._arguments = _aligned(len(launches), _MAX_ARGUMENTS)
        self._table = _aligned(len(launches), _TAKEN + _LINE * team.num_threads)
        for row, launch in enumerate(launches):
            team.check(launch)
            self._arguments[row, 1 : 1 + len(launch.arguments)] = launch.arguments
            self._table[row, _KERNEL] = team.address(launch.kernel)
        self._table[:, _ARGUMENTS] = self._arguments.ctypes.data + _MAX_ARGUMENTS * 8 * np.arange(len(launches))
        # Launches that run together count their items in the last one's record, where all are waited for.
        self._starts = np.flatnonzero([not (launch.joins and row) for row, launch in enumerate(launches)])
        self._ends = np.append(self._starts, len(launches))[1:] - 1
        last = np.repeat(self._ends, np.diff(self._starts, append=len(launches)))
        self._table[:, _COUNTER] = self._table.ctypes.data + self._table.strides[0] * last + 8 * _DONE
        self._counted = np.flatnonzero([launch.counted_at for launch in launches])
        self._set_counters(launches)
        self._state = np.array([self._table.ctypes.data, len(launches), team.num_threads], np.int64)
        self._last: list[int] | None = None
        """The counts for which the table is filled."""

    def _set_counters(self, launches: Sequence[KernelLaunch]) -> None:
        """Set where the driver finds how many items a launch has: in its own record, or in other memory."""
        own = self._table.ctypes.data + self._table.strides[0] * np.arange(len(launches))
        self._table[:, _ITEMS_AT], self._table[:, _AWAITED_AT] = own + 8 * _ITEMS, own + 8 * _AWAITED
        self._table[:, _GROUPS] = 1
        for row, launch in enumerate(launches):
            if launch.counted_at:
                assert {row} <= {*self._starts} & {*self._ends}, "a launch that is counted in memory runs by itself"
                self._table[row, [_ITEMS_AT, _AWAITED_AT]] = launch.counted_at

    def run(self, **counts: int) -> None:
        """Run all launches, in order; return when they are done."""
        given = [counts[name] for name in self._counts]
        if given != self._last:
            self._fill(given)
        self._table[:, _DONE:] = 0
        self._team.drive(self._state.ctypes.data)

    def _fill(self, counts: list[int]) -> None:
        """Set the counts of kernels and items."""
        count = np.array(counts, np.int64)[self._which] * self._times
        self._arguments[:, 0] = count
        items = np.where(count < self._least, 0, -(-count // self._share) * self._groups)
        self._table[:, _ITEMS] = items
        self._table[self._ends, _AWAITED] = np.add.reduceat(items, self._starts) if len(items) else 0
        if len(self._counted):
            self._table[self._counted, _GROUPS] = np.where(items[self._counted], self._groups[self._counted], 0)
        self._last = counts


class Team:
    """Runs the kernels of one `Code`; for use by one thread."""

    def __init__(self, code: Code, num_threads: int) -> None:
        """Use num_threads threads, the calling one included; only the calling one without OpenMP's library."""
        self._code = code
        start, number = symbol(_OPENMP, "GOMP_parallel"), symbol(_OPENMP, "omp_get_thread_num")
        alone = code.function("drive_alone", 1, lambda emit, state: _drive(emit.builder, state.value, _I64(0)))
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_int64)(code.address(alone))
        self.num_threads = 1
        if num_threads > 1 and start is not None and number is not None:
            self.num_threads = num_threads
            member = code.function(
                "drive_in_team", 1, lambda emit, state: _drive_in_team(emit.builder, state.value, number)
            )
            self._member = code.address(member)
            self._start = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint, ctypes.c_uint)(start)

    def address(self, kernel: str) -> int:
        return self._code.address(kernel)

    def check(self, launch: KernelLaunch) -> None:
        """Raise AssertionError for a launch with more or fewer arguments than its kernel reads."""
        given, wanted = 1 + len(launch.arguments), self._code.num_arguments(launch.kernel)
        assert given == wanted, f"{launch.kernel} has {wanted} arguments, its launch {given}"
        assert given <= _MAX_ARGUMENTS

    def drive(self, state: int) -> None:
        """Run the launches of a program; state: address of its state."""
        if self.num_threads == 1:
            self._alone(state)
        else:
            self._start(self._member, state, self.num_threads, 0)


def _drive_in_team(builder: ir.IRBuilder, state: ir.Value, number: int) -> None:
    kind = ir.FunctionType(ir.IntType(32), []).as_pointer()
    thread = builder.call(builder.inttoptr(_I64(number), kind), [])
    _drive(builder, state, builder.zext(thread, _I64))


def _drive(builder: ir.IRBuilder, state: ir.Value, thread: ir.Value) -> None:
    """Emit the loop of a thread: take items of each launch until none is left, then wait until all are done."""
    function = builder.function
    names = ("launch", "begin", "share", "take", "work", "other", "add", "wait", "spin", "next", "end")
    launch, begin, share, take, work, other, add, wait, spin, following, end = map(function.append_basic_block, names)
    table, count, threads = (builder.load(_field(builder, state, which)) for which in range(3))
    record_bytes = builder.mul(builder.add(threads, _I64(_TAKEN // _LINE)), _I64(8 * _LINE))
    before = builder.block
    builder.branch(launch)

    builder.position_at_end(launch)
    index = builder.phi(_I64)
    index.add_incoming(_I64(0), before)
    builder.cbranch(builder.icmp_signed("<", index, count), begin, end)

    builder.position_at_end(begin)
    record = builder.add(table, builder.mul(index, record_bytes))
    kernel, arguments, counter, items_at, awaited_at, groups = (
        builder.load(_field(builder, record, which))
        for which in (_KERNEL, _ARGUMENTS, _COUNTER, _ITEMS_AT, _AWAITED_AT, _GROUPS)
    )
    items, awaited = (builder.mul(builder.load(_field(builder, at, 0)), groups) for at in (items_at, awaited_at))
    done_items = builder.inttoptr(counter, _I64.as_pointer())
    run = builder.inttoptr(kernel, ir.FunctionType(_VOID, [_I64] * 3).as_pointer())
    later = builder.add(record, builder.mul(record_bytes, _I64(_AHEAD)))
    own = builder.add(later, builder.mul(thread, _I64(8 * _LINE)))
    read_by_kernel = builder.add(arguments, _I64(8 * _MAX_ARGUMENTS * _AHEAD))
    for place, line in ((later, 0), (own, _TAKEN), (read_by_kernel, 0), (read_by_kernel, _LINE)):
        _prefetch(builder, _field(builder, place, line))
    builder.branch(share)

    builder.position_at_end(share)
    turn, worked = builder.phi(_I64), builder.phi(_I64)
    turn.add_incoming(_I64(0), begin)
    worked.add_incoming(_I64(0), begin)
    which = builder.urem(builder.add(thread, turn), threads)
    taken = _field(builder, record, _TAKEN, builder.mul(which, _I64(8 * _LINE)))

    def item_of(place: ir.Value) -> ir.Value:
        return builder.add(which, builder.mul(place, threads))

    # A look first: taking pulls the line to this core, and most shares of others are empty then.
    some_left = builder.icmp_signed("<", item_of(builder.load_atomic(taken, "monotonic", 8)), items)
    builder.cbranch(some_left, take, other)

    builder.position_at_end(take)
    so_far = builder.phi(_I64)
    so_far.add_incoming(worked, share)
    item = item_of(builder.atomic_rmw("add", taken, _I64(1), "acq_rel"))
    builder.cbranch(builder.icmp_signed("<", item, items), work, other)

    builder.position_at_end(work)
    builder.call(run, [arguments, item, thread])
    so_far.add_incoming(builder.add(so_far, _I64(1)), work)
    builder.branch(take)

    builder.position_at_end(other)
    worked_here, next_turn = builder.phi(_I64), builder.add(turn, _I64(1))
    worked_here.add_incoming(worked, share)
    worked_here.add_incoming(so_far, take)
    turn.add_incoming(next_turn, other)
    worked.add_incoming(worked_here, other)
    builder.cbranch(builder.icmp_signed("<", next_turn, threads), share, add)

    builder.position_at_end(add)
    with builder.if_then(builder.icmp_signed(">", worked_here, _I64(0))):
        builder.atomic_rmw("add", done_items, worked_here, "acq_rel")
    added = builder.block
    builder.branch(wait)

    builder.position_at_end(wait)
    spins = builder.phi(_I64)
    spins.add_incoming(_I64(0), added)
    done = builder.load_atomic(done_items, "acquire", 8)
    builder.cbranch(builder.icmp_signed("<", done, awaited), spin, following)

    builder.position_at_end(spin)
    more = builder.add(spins, _I64(1))
    pause(builder, more)
    spins.add_incoming(more, builder.block)
    builder.branch(wait)

    builder.position_at_end(following)
    index.add_incoming(builder.add(index, _I64(1)), builder.block)
    builder.branch(launch)
    builder.position_at_end(end)


def _field(builder: ir.IRBuilder, record: ir.Value, index: int, more: ir.Value | None = None) -> ir.Value:
    """Return the place of a field; more: bytes to be added."""
    address = builder.add(record, _I64(8 * index))
    return builder.inttoptr(address if more is None else builder.add(address, more), _I64.as_pointer())


def _prefetch(builder: ir.IRBuilder, place: ir.Value) -> None:
    """Prefetch a line into the first cache, to be read; it may lie beyond all memory."""
    module, name, flag = builder.module, "llvm.prefetch.p0", ir.IntType(32)
    kind = ir.FunctionType(_VOID, [ir.IntType(8).as_pointer(), flag, flag, flag])
    function = module.globals.get(name) or ir.Function(module, kind, name)
    builder.call(function, [builder.bitcast(place, ir.IntType(8).as_pointer()), flag(0), flag(3), flag(1)])


def _aligned(rows: int, fields: int) -> NDArray[np.int64]:
    """Return zeros [rows, fields] int64 that begin with a cache line."""
    memory = np.zeros(rows * fields + _LINE, np.int64)
    first = -memory.ctypes.data // 8 % _LINE
    return memory[first : first + rows * fields].reshape(rows, fields)


def pause(builder: ir.IRBuilder, spins: ir.Value) -> None:
    """Yield to the core's other hardware thread, and sometimes to any process: it may hold up the awaited item."""
    give_way = symbol(None, "sched_yield")
    if "x86_64" in llvm.get_default_triple():
        module = builder.module
        name = "llvm.x86.sse2.pause"
        builder.call(module.globals.get(name) or ir.Function(module, ir.FunctionType(_VOID, []), name), [])
    if give_way is not None:
        seldom = builder.icmp_signed("==", builder.urem(spins, _I64(_SPINS_BEFORE_YIELD)), _I64(0))
        with builder.if_then(seldom):
            kind = ir.FunctionType(ir.IntType(32), []).as_pointer()
            builder.call(builder.inttoptr(_I64(give_way), kind), [])
