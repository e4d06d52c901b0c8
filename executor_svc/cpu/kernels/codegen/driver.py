"""The loop of a thread of a team: it takes items of each launch of a program, and waits until all are done.

A program is a table with a record for each launch, all of 64-bit integers: a line of fields that do not change in a
run, a line with the items that are done and its chain, and a line for each thread with how many items of its share
have been taken. Launches with one item that follow each other are a chain: one thread runs all of them.
"""

from __future__ import annotations

from llvmlite import binding as llvm
from llvmlite import ir

from executor_svc.cpu.kernels.codegen.compiled import symbol

LINE = 8
"""Fields of a cache line."""
KERNEL, ARGUMENTS, COUNTER, ITEMS_AT, AWAITED_AT, GROUPS, ITEMS, AWAITED = range(LINE)
DONE, CHAIN = LINE, LINE + 1
"""CHAIN: launches behind this one that are in its chain; their own records are not looked at."""
TAKEN = 2 * LINE
"""Of the first thread; those of others are lines behind it."""
ARGUMENT_FIELDS = 2 * LINE
"""Of the arguments of a launch, which lie one behind the other."""
_AHEAD = 2
"""Launches by which a thread prefetches what the driver and the kernel read: weights have pushed it out of the caches
since the last run."""
_SPINS_BEFORE_YIELD = 2000
_I64, _VOID = ir.IntType(64), ir.VoidType()


def drive(builder: ir.IRBuilder, state: ir.Value, thread: ir.Value) -> None:
    """Emit the loop; state: address of [table, number of launches, number of threads]."""
    table, count, threads = (builder.load(_field(builder, state, which)) for which in range(3))
    _LaunchLoop(builder, threads, thread).run(table, count)


class _LaunchLoop:
    def __init__(self, builder: ir.IRBuilder, threads: ir.Value, thread: ir.Value) -> None:
        self._builder, self._threads, self._thread = builder, threads, thread
        lines = builder.add(threads, _I64(TAKEN // LINE))
        self._record_bytes = builder.mul(lines, _I64(8 * LINE))

    def run(self, table: ir.Value, count: ir.Value) -> None:
        builder = self._builder
        launch, begin, end = (builder.append_basic_block(name) for name in ("launch", "begin", "end"))
        before = builder.block
        builder.branch(launch)
        builder.position_at_end(launch)
        index = builder.phi(_I64)
        index.add_incoming(_I64(0), before)
        builder.cbranch(builder.icmp_signed("<", index, count), begin, end)

        builder.position_at_end(begin)
        record = builder.add(table, builder.mul(index, self._record_bytes))
        kernel, arguments, counter, items_at, awaited_at, groups = (
            builder.load(_field(builder, record, which))
            for which in (KERNEL, ARGUMENTS, COUNTER, ITEMS_AT, AWAITED_AT, GROUPS)
        )
        items, awaited = (builder.mul(builder.load(_field(builder, at, 0)), groups) for at in (items_at, awaited_at))
        self._prefetch_later(record, arguments)
        done = builder.inttoptr(counter, _I64.as_pointer())
        worked = self._take_items(record, kernel, arguments, items)
        with builder.if_then(builder.icmp_signed(">", worked, _I64(0))):
            builder.atomic_rmw("add", done, worked, "acq_rel")
        self._wait(done, awaited)
        following = builder.add(builder.add(index, _I64(1)), builder.load(_field(builder, record, CHAIN)))
        index.add_incoming(following, builder.block)
        builder.branch(launch)
        builder.position_at_end(end)

    def _prefetch_later(self, record: ir.Value, arguments: ir.Value) -> None:
        """Prefetch what is read of a later launch."""
        builder = self._builder
        later = builder.add(record, builder.mul(self._record_bytes, _I64(_AHEAD)))
        share = builder.add(later, builder.mul(self._thread, _I64(8 * LINE)))
        read_by_kernel = builder.add(arguments, _I64(8 * ARGUMENT_FIELDS * _AHEAD))
        for place, line in ((later, 0), (share, TAKEN), (read_by_kernel, 0), (read_by_kernel, LINE)):
            _prefetch(builder, _field(builder, place, line))

    def _take_items(self, record: ir.Value, kernel: ir.Value, arguments: ir.Value, items: ir.Value) -> ir.Value:
        """Compute items of the own share, then those that others have left; return how many."""
        builder, threads = self._builder, self._threads
        names = ("share", "take", "work", "other", "taken")
        share, take, work, other, end = (builder.append_basic_block(name) for name in names)
        before = builder.block
        builder.branch(share)

        builder.position_at_end(share)
        turn, worked = builder.phi(_I64), builder.phi(_I64)
        turn.add_incoming(_I64(0), before)
        worked.add_incoming(_I64(0), before)
        which = builder.urem(builder.add(self._thread, turn), threads)
        taken = _field(builder, record, TAKEN, builder.mul(which, _I64(8 * LINE)))

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
        self._call(kernel, arguments, item)
        self._run_chain(record)
        so_far.add_incoming(builder.add(so_far, _I64(1)), builder.block)
        builder.branch(take)

        builder.position_at_end(other)
        worked_here, next_turn = builder.phi(_I64), builder.add(turn, _I64(1))
        worked_here.add_incoming(worked, share)
        worked_here.add_incoming(so_far, take)
        turn.add_incoming(next_turn, other)
        worked.add_incoming(worked_here, other)
        builder.cbranch(builder.icmp_signed("<", next_turn, threads), share, end)
        builder.position_at_end(end)
        return worked_here

    def _run_chain(self, record: ir.Value) -> None:
        """Run the launches that are in the chain of the one whose item has been computed."""
        builder = self._builder
        last = builder.add(record, builder.mul(self._record_bytes, builder.load(_field(builder, record, CHAIN))))
        before = builder.block
        more, run, end = (builder.append_basic_block(name) for name in ("more", "run", "ran"))
        builder.branch(more)
        builder.position_at_end(more)
        done = builder.phi(_I64)
        done.add_incoming(record, before)
        builder.cbranch(builder.icmp_unsigned("<", done, last), run, end)

        builder.position_at_end(run)
        here = builder.add(done, self._record_bytes)
        kernel, arguments = (builder.load(_field(builder, here, which)) for which in (KERNEL, ARGUMENTS))
        self._prefetch_later(here, arguments)
        self._call(kernel, arguments, _I64(0))
        done.add_incoming(here, builder.block)
        builder.branch(more)
        builder.position_at_end(end)

    def _call(self, kernel: ir.Value, arguments: ir.Value, item: ir.Value) -> None:
        run = self._builder.inttoptr(kernel, ir.FunctionType(_VOID, [_I64] * 3).as_pointer())
        self._builder.call(run, [arguments, item, self._thread])

    def _wait(self, done: ir.Value, awaited: ir.Value) -> None:
        """Wait until all items are done."""
        builder = self._builder
        wait, spin, end = (builder.append_basic_block(name) for name in ("wait", "spin", "next"))
        before = builder.block
        builder.branch(wait)
        builder.position_at_end(wait)
        spins = builder.phi(_I64)
        spins.add_incoming(_I64(0), before)
        builder.cbranch(builder.icmp_signed("<", builder.load_atomic(done, "acquire", 8), awaited), spin, end)

        builder.position_at_end(spin)
        more = builder.add(spins, _I64(1))
        pause(builder, more)
        spins.add_incoming(more, builder.block)
        builder.branch(wait)
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
