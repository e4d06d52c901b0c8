"""Threads that run kernels: a recorded list of launches with one call.

A launch has items, which free threads take one by one, so a thread that lost its core to another process delays only
its current item. The next launch begins when all items of the last are done, or taken if it joins that one. An item's
bits do not depend on the thread that computes it. The threads are OpenMP's, the same that PyTorch uses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir

from executor_svc.cpu.kernels.codegen.compiled import Code, symbol

_I64, _VOID = ir.IntType(64), ir.VoidType()
_FIELDS = 10
_KERNEL, _ARGUMENTS, _COUNTER, _ITEMS_AT, _AWAITED_AT, _GROUPS, _ITEMS, _AWAITED, _TAKEN, _DONE = range(_FIELDS)
_SPINS_BEFORE_YIELD = 2000
_OPENMP = "libgomp.so.1"
_MAX_ARGUMENTS = 14


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
        self._arguments = np.zeros((len(launches), _MAX_ARGUMENTS), np.int64)
        self._table = np.zeros((len(launches), _FIELDS), np.int64)
        for row, launch in enumerate(launches):
            team.check(launch)
            self._arguments[row, 1 : 1 + len(launch.arguments)] = launch.arguments
            self._table[row, _KERNEL] = team.address(launch.kernel)
        self._table[:, _ARGUMENTS] = self._arguments.ctypes.data + _MAX_ARGUMENTS * 8 * np.arange(len(launches))
        # Launches that run together count their items in the last one's record, where all are waited for.
        self._starts = np.flatnonzero([not (launch.joins and row) for row, launch in enumerate(launches)])
        self._ends = np.append(self._starts, len(launches))[1:] - 1
        last = np.repeat(self._ends, np.diff(self._starts, append=len(launches)))
        self._table[:, _COUNTER] = self._table.ctypes.data + 8 * (_FIELDS * last + _DONE)
        self._counted = np.flatnonzero([launch.counted_at for launch in launches])
        self._set_counters(launches)
        self._state = np.array([self._table.ctypes.data, len(launches)], np.int64)
        self._state_at = self._state.ctypes.data
        self._progress = self._table[:, _TAKEN:]
        self._last: dict[str, int] = {}
        """The counts that are set."""

    def _set_counters(self, launches: Sequence[KernelLaunch]) -> None:
        """Set where the driver finds how many items a launch has: in its own record, or in other memory."""
        own = self._table.ctypes.data + 8 * _FIELDS * np.arange(len(launches))
        self._table[:, _ITEMS_AT], self._table[:, _AWAITED_AT] = own + 8 * _ITEMS, own + 8 * _AWAITED
        self._table[:, _GROUPS] = 1
        for row, launch in enumerate(launches):
            if launch.counted_at:
                assert {row} <= {*self._starts} & {*self._ends}, "a launch that is counted in memory runs by itself"
                self._table[row, [_ITEMS_AT, _AWAITED_AT]] = launch.counted_at

    def set_arguments(self, *arguments: int) -> None:
        """Set what the program's only launch has after its count."""
        assert len(self._arguments) == 1
        self._arguments[0, 1 : 1 + len(arguments)] = arguments

    def run(self, **counts: int) -> None:
        """Run all launches, in order; return when they are done."""
        if counts != self._last:
            self._set_counts(counts)
            self._last = counts
        self._progress[:] = 0
        self._team.drive(self._state_at)

    def _set_counts(self, counts: Mapping[str, int]) -> None:
        count = np.array([counts[name] for name in self._counts], np.int64)[self._which] * self._times
        self._arguments[:, 0] = count
        items = np.where(count < self._least, 0, -(-count // self._share) * self._groups)
        self._table[:, _ITEMS] = items
        self._table[self._ends, _AWAITED] = np.add.reduceat(items, self._starts) if len(items) else 0
        if len(self._counted):
            self._table[self._counted, _GROUPS] = np.where(items[self._counted], self._groups[self._counted], 0)


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
    names = ("launch", "begin", "take", "work", "wait", "spin", "next", "end")
    launch, begin, take, work, wait, spin, following, end = (function.append_basic_block(name) for name in names)

    def field(record: ir.Value, index: int) -> ir.Value:
        return builder.inttoptr(builder.add(record, _I64(8 * index)), _I64.as_pointer())

    table, count = builder.load(field(state, 0)), builder.load(field(state, 1))
    before = builder.block
    builder.branch(launch)

    builder.position_at_end(launch)
    index = builder.phi(_I64)
    index.add_incoming(_I64(0), before)
    builder.cbranch(builder.icmp_signed("<", index, count), begin, end)

    builder.position_at_end(begin)
    record = builder.add(table, builder.mul(index, _I64(8 * _FIELDS)))
    kernel, arguments, counter, items_at, awaited_at, groups = (
        builder.load(field(record, which)) for which in (_KERNEL, _ARGUMENTS, _COUNTER, _ITEMS_AT, _AWAITED_AT, _GROUPS)
    )
    items, awaited = (builder.mul(builder.load(field(at, 0)), groups) for at in (items_at, awaited_at))
    done_items = builder.inttoptr(counter, _I64.as_pointer())
    run = builder.inttoptr(kernel, ir.FunctionType(_VOID, [_I64] * 3).as_pointer())
    builder.branch(take)

    builder.position_at_end(take)
    item = builder.atomic_rmw("add", field(record, _TAKEN), _I64(1), "acq_rel")
    builder.cbranch(builder.icmp_signed("<", item, items), work, wait)

    builder.position_at_end(work)
    builder.call(run, [arguments, item, thread])
    builder.atomic_rmw("add", done_items, _I64(1), "acq_rel")
    builder.branch(take)

    builder.position_at_end(wait)
    spins = builder.phi(_I64)
    spins.add_incoming(_I64(0), take)
    done = builder.load_atomic(done_items, "acquire", 8)
    builder.cbranch(builder.icmp_signed("<", done, awaited), spin, following)

    builder.position_at_end(spin)
    more = builder.add(spins, _I64(1))
    pause(builder, more)
    spins.add_incoming(more, builder.block)
    builder.branch(wait)

    builder.position_at_end(following)
    index.add_incoming(builder.add(index, _I64(1)), following)
    builder.branch(launch)
    builder.position_at_end(end)


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
