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
from llvmlite import ir
from numpy.typing import NDArray

from executor_svc.cpu.kernels.codegen.compiled import Code, symbol
from executor_svc.cpu.kernels.codegen.driver import (
    ARGUMENT_FIELDS,
    ARGUMENTS,
    AWAITED,
    AWAITED_AT,
    CHAIN,
    COUNTER,
    DONE,
    GROUPS,
    ITEMS,
    ITEMS_AT,
    KERNEL,
    LINE,
    TAKEN,
    drive,
)

_I64 = ir.IntType(64)
_OPENMP = "libgomp.so.1"


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
        self._arguments = _aligned(len(launches), ARGUMENT_FIELDS)
        self._table = _aligned(len(launches), TAKEN + LINE * team.num_threads)
        for row, launch in enumerate(launches):
            team.check(launch)
            self._arguments[row, 1 : 1 + len(launch.arguments)] = launch.arguments
            self._table[row, KERNEL] = team.address(launch.kernel)
        self._table[:, ARGUMENTS] = self._arguments.ctypes.data + ARGUMENT_FIELDS * 8 * np.arange(len(launches))
        # Launches that run together count their items in the last one's record, where all are waited for.
        self._starts = np.flatnonzero([not (launch.joins and row) for row, launch in enumerate(launches)])
        self._ends = np.append(self._starts, len(launches))[1:] - 1
        self._sizes = np.diff(self._starts, append=len(launches))
        self._own_counters = self._table.ctypes.data + self._table.strides[0] * np.arange(len(launches)) + 8 * DONE
        self._counted = np.flatnonzero([launch.counted_at for launch in launches])
        self._set_counters(launches)
        self._state = np.array([self._table.ctypes.data, len(launches), team.num_threads], np.int64)
        self._state_at = self._state.ctypes.data
        self._done, self._progress = self._table[:, DONE], self._table[:, TAKEN:]
        self._last: list[int] | None = None
        """The counts for which the table is filled."""

    def _set_counters(self, launches: Sequence[KernelLaunch]) -> None:
        """Set where the driver finds how many items a launch has: in its own record, or in other memory."""
        own = self._table.ctypes.data + self._table.strides[0] * np.arange(len(launches))
        self._table[:, ITEMS_AT], self._table[:, AWAITED_AT] = own + 8 * ITEMS, own + 8 * AWAITED
        self._table[:, GROUPS] = 1
        for row, launch in enumerate(launches):
            if launch.counted_at:
                assert {row} <= {*self._starts} & {*self._ends}, "a launch that is counted in memory runs by itself"
                self._table[row, [ITEMS_AT, AWAITED_AT]] = launch.counted_at

    def set_arguments(self, *arguments: int) -> None:
        """Set what the program's only launch has after its count."""
        assert len(self._arguments) == 1
        self._arguments[0, 1 : 1 + len(arguments)] = arguments

    def run(self, **counts: int) -> None:
        """Run all launches, in order; return when they are done."""
        given = [counts[name] for name in self._counts]
        if given != self._last:
            self._fill(given)
        self._done[:] = 0
        self._progress[:] = 0
        self._team.drive(self._state_at)

    def _fill(self, counts: list[int]) -> None:
        """Set the counts of kernels and items."""
        count = np.array(counts, np.int64)[self._which] * self._times
        self._arguments[:, 0] = count
        items = np.where(count < self._least, 0, -(-count // self._share) * self._groups)
        self._table[:, ITEMS] = items
        self._table[:, AWAITED] = 0
        self._table[self._ends, AWAITED] = np.add.reduceat(items, self._starts) if len(items) else 0
        if len(self._counted):
            self._table[self._counted, GROUPS] = np.where(items[self._counted], self._groups[self._counted], 0)
        self._table[:, COUNTER] = self._own_counters[np.repeat(self._ends, self._sizes)]
        self._set_chains(items == 1)
        self._last = counts

    def _set_chains(self, single: NDArray[np.bool_]) -> None:
        """Make chains of groups that follow each other; single: whether a launch has one item."""
        single[self._counted] = False
        self._table[:, CHAIN] = 0
        if not len(single):
            return
        chained = np.logical_and.reduceat(single, self._starts)
        edges = np.diff(chained, prepend=False, append=False).nonzero()[0]
        firsts, ends = self._starts[edges[::2]], self._ends[edges[1::2] - 1]
        self._table[firsts, CHAIN] = ends - firsts
        self._table[firsts, AWAITED] = 1
        self._table[firsts, COUNTER] = self._own_counters[firsts]


class Team:
    """Runs the kernels of one `Code`; for use by one thread."""

    def __init__(self, code: Code, num_threads: int) -> None:
        """Use num_threads threads, the calling one included; only the calling one without OpenMP's library."""
        self._code = code
        start, number = symbol(_OPENMP, "GOMP_parallel"), symbol(_OPENMP, "omp_get_thread_num")
        alone = code.function("drive_alone", 1, lambda emit, state: drive(emit.builder, state.value, _I64(0)))
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
        assert given <= ARGUMENT_FIELDS

    def drive(self, state: int) -> None:
        """Run the launches of a program; state: address of its state."""
        if self.num_threads == 1:
            self._alone(state)
        else:
            self._start(self._member, state, self.num_threads, 0)


def _drive_in_team(builder: ir.IRBuilder, state: ir.Value, number: int) -> None:
    kind = ir.FunctionType(ir.IntType(32), []).as_pointer()
    thread = builder.call(builder.inttoptr(_I64(number), kind), [])
    drive(builder, state, builder.zext(thread, _I64))


def _aligned(rows: int, fields: int) -> NDArray[np.int64]:
    """Return zeros [rows, fields] int64 that begin with a cache line."""
    memory = np.zeros(rows * fields + LINE, np.int64)
    first = -memory.ctypes.data // 8 % LINE
    return memory[first : first + rows * fields].reshape(rows, fields)
