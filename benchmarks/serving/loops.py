"""Machine code that multiplies or reads and does nothing else: the highest rates of a processor, by instruction set.

A loop leans on no library, so it can be run for an instruction set below the processor's highest one.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import binding as llvm

_CHAINS = 12
"""Independent sums: more than latency times issue rate of any known processor, fewer than its registers."""
_READ_CHAINS = 8
_READ_STREAMS = 4
"""Places that a thread reads from in turns: hardware prefetchers follow several at once."""
_LINE = 64
"""Bytes that a read takes at once."""
_TILE_SUMS = 4
"""Tile registers of sums; two more are left factors and two are right ones, as in a kernel."""
_TILE_ROWS, _TILE_BYTES = 16, 64


@dataclass(frozen=True, slots=True)
class Loop:
    """A function f(count, source, result) as LLVM's text, and the work of a turn."""

    text: str
    per_turn: int
    """Operations, or bytes."""
    without: str = ""
    """Features of this processor that the code must not use, as LLVM has them."""


def multiply_add(lanes: int) -> Loop:
    """Fused multiply-adds of float32 vectors; lanes: 8 is a register of AVX2, 16 one of AVX-512, 4 one of NEON."""
    kind = f"<{lanes} x float>"
    declare = f"declare {kind} @llvm.fma.v{lanes}f32({kind}, {kind}, {kind})"

    def step(chain: int) -> str:
        return f"%n{chain} = call {kind} @llvm.fma.v{lanes}f32({kind} %c{chain}, {kind} %x, {kind} %x)"

    load = f"%p = inttoptr i64 %source to ptr\n  %x = load {kind}, ptr %p, align 4"
    return Loop(_text(kind, declare, load, step), 2 * lanes * _CHAINS)


def bfloat16_pairs() -> Loop:
    """AVX512-BF16's dot products of pairs (vdpbf16ps) on registers of 512 bits."""
    kind, pairs = "<16 x float>", "<32 x bfloat>"
    name = "@llvm.x86.avx512bf16.dpbf16ps.512"
    declare = f"declare {kind} {name}({kind}, {pairs}, {pairs})"

    def step(chain: int) -> str:
        return f"%n{chain} = call {kind} {name}({kind} %c{chain}, {pairs} %x, {pairs} %x)"

    load = f"%p = inttoptr i64 %source to ptr\n  %x = load {pairs}, ptr %p, align 4"
    return Loop(_text(kind, declare, load, step), 2 * 32 * _CHAINS)


def int8_dots(lanes: int) -> Loop:
    """VNNI's dot products of four unsigned and four signed bytes in each of the 32-bit lanes (vpdpbusd)."""
    kind, name = f"<{lanes} x i32>", f"@llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    declare = f"declare {kind} {name}({kind}, {kind}, {kind})"

    def step(chain: int) -> str:
        return f"%n{chain} = call {kind} {name}({kind} %c{chain}, {kind} %x, {kind} %x)"

    load = f"%p = inttoptr i64 %source to ptr\n  %x = load {kind}, ptr %p, align 4"
    return Loop(_text(kind, declare, load, step, "add"), 8 * lanes * _CHAINS)


def int8_pairs(lanes: int, words: int) -> Loop:
    """The same without VNNI: sums of `words` vpmaddubsw in 16 bits, which one vpmaddwd widens to 32."""
    kind, shorts, codes = f"<{lanes} x i32>", f"<{2 * lanes} x i16>", f"<{4 * lanes} x i8>"
    multiply, widen = (
        ("@llvm.x86.avx512.pmaddubs.w.512", "@llvm.x86.avx512.pmaddw.d.512")
        if lanes == 16
        else ("@llvm.x86.avx2.pmadd.ub.sw", "@llvm.x86.avx2.pmadd.wd")
    )
    declare = f"declare {shorts} {multiply}({codes}, {codes})\ndeclare {kind} {widen}({shorts}, {shorts})"

    def step(chain: int) -> str:
        # Each product has the sum before it as an operand: equal products would be computed once.
        lines, before, kind_before = [], f"%c{chain}", kind
        for word in range(words):
            here = f"{chain}_{word}"
            product = f"%m{here}"
            lines.append(f"%b{here} = bitcast {kind_before} {before} to {codes}")
            lines.append(f"{product} = call {shorts} {multiply}({codes} %x, {codes} %b{here})")
            if word:
                lines.append(f"%s{here} = add {shorts} {product}, {before}")
            before, kind_before = f"%s{here}" if word else product, shorts
        return "\n  ".join(
            [
                *lines,
                f"%w{chain} = call {kind} {widen}({shorts} {before}, {shorts} %ones)",
                f"%n{chain} = add {kind} %c{chain}, %w{chain}",
            ]
        )

    load = f"""%p = inttoptr i64 %source to ptr
  %x = load {codes}, ptr %p, align 4
  %ones = load {shorts}, ptr %p, align 4"""
    text = _text(kind, declare, load, step, "add")
    return Loop(text, 8 * lanes * words * _CHAINS, "-avx512vnni,-avxvnni")  # else a widening and its sum become one


def tile_products(instruction: str, item_bytes: int) -> Loop:
    """AMX's products of two tiles of 16 rows of 64 bytes; `tdpbf16ps` has items of 2 bytes, `tdpbssd` of 1."""
    products = [f"i8 {total}, i8 {4 + total // 2}, i8 {6 + total % 2}" for total in range(_TILE_SUMS)]
    calls = "\n  ".join(f"call void @llvm.x86.{instruction}({each})" for each in products * 2)
    loads = "\n  ".join(
        f"call void @llvm.x86.tileloadd64(i8 {tile}, ptr %p, i64 0)" for tile in range(_TILE_SUMS, 2 * _TILE_SUMS)
    )
    # The palette in byte 0, bytes of a row from byte 16 on, rows from byte 48 on (Intel's manual, LDTILECFG).
    widths, rows = (
        sum(number << step * tile for tile in range(8)) for number, step in ((_TILE_BYTES, 16), (_TILE_ROWS, 8))
    )
    words = (1, 0, widths % 2**64, widths >> 64, 0, 0, rows, 0)
    config = ", ".join(f"i64 {word}" for word in words)
    return Loop(
        f"""
@config = private constant [8 x i64] [{config}], align 64
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.{instruction}(i8 immarg, i8 immarg, i8 immarg)
define void @run(i64 %count, i64 %source, i64 %result) {{
entry:
  call void @llvm.x86.ldtilecfg(ptr @config)
  %p = inttoptr i64 %source to ptr
  {loads}
  br label %body
body:
  %i = phi i64 [0, %entry], [%following, %body]
  {calls}
  %following = add i64 %i, 1
  %more = icmp ult i64 %following, %count
  br i1 %more, label %body, label %after
after:
  call void @llvm.x86.tilerelease()
  ret void
}}
""",
        2 * len(products) * 2 * _TILE_ROWS * _TILE_ROWS * (_TILE_BYTES // item_bytes),
    )


def _text(kind: str, declare: str, load: str, step: Callable[[int], str], add: str = "fadd") -> str:
    """A loop of `count` turns over _CHAINS sums, whose total is stored at `result`."""
    chains = range(_CHAINS)
    phis = "\n  ".join(f"%c{chain} = phi {kind} [zeroinitializer, %entry], [%n{chain}, %body]" for chain in chains)
    steps = "\n  ".join(step(chain) for chain in chains)
    totals = "\n  ".join(
        f"%t{chain} = {add} {kind} {'%n0' if chain == 1 else f'%t{chain - 1}'}, %n{chain}" for chain in chains[1:]
    )
    return f"""
{declare}
define void @run(i64 %count, i64 %source, i64 %result) {{
entry:
  {load}
  br label %body
body:
  %i = phi i64 [0, %entry], [%following, %body]
  {phis}
  {steps}
  %following = add i64 %i, 1
  %more = icmp ult i64 %following, %count
  br i1 %more, label %body, label %after
after:
  {totals}
  %out = inttoptr i64 %result to ptr
  store {kind} %t{_CHAINS - 1}, ptr %out, align 4
  ret void
}}
"""


def read_sum() -> Loop:
    """Reads of whole cache lines into sums of float32, from _READ_STREAMS places; `count` turns of each."""
    kind, chains = "<16 x float>", _READ_STREAMS * (_READ_CHAINS // _READ_STREAMS)
    lines = []
    for chain in range(chains):
        stream, line = chain % _READ_STREAMS, chain // _READ_STREAMS
        lines += [
            f"%s{chain} = mul i64 %length, {stream}",
            f"%o{chain} = add i64 %s{chain}, %offset",
            f"%l{chain} = add i64 %o{chain}, {line * _LINE}",
            f"%a{chain} = add i64 %source, %l{chain}",
            f"%q{chain} = inttoptr i64 %a{chain} to ptr",
            f"%v{chain} = load {kind}, ptr %q{chain}, align 4",
            f"%n{chain} = fadd {kind} %c{chain}, %v{chain}",
        ]
    phis = "\n  ".join(
        f"%c{chain} = phi {kind} [zeroinitializer, %entry], [%n{chain}, %body]" for chain in range(chains)
    )
    totals = "\n  ".join(
        f"%t{chain} = fadd {kind} {'%n0' if chain == 1 else f'%t{chain - 1}'}, %n{chain}" for chain in range(1, chains)
    )
    step = chains // _READ_STREAMS * _LINE
    body = "\n  ".join(lines)
    return Loop(
        f"""
define void @run(i64 %count, i64 %source, i64 %result) {{
entry:
  %length = mul i64 %count, {step}
  br label %body
body:
  %i = phi i64 [0, %entry], [%following, %body]
  {phis}
  %offset = mul i64 %i, {step}
  {body}
  %following = add i64 %i, 1
  %more = icmp ult i64 %following, %count
  br i1 %more, label %body, label %after
after:
  {totals}
  %out = inttoptr i64 %result to ptr
  store {kind} %t{chains - 1}, ptr %out, align 4
  ret void
}}
""",
        chains * _LINE,
    )


@cache
def _target() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple()


def _machine(features: str) -> Any:
    # Vectors of 512 bits are used as they are written.
    host = llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit" + (f",{features}" if features else "")
    return _target().create_target_machine(cpu=llvm.get_host_cpu_name(), features=host, opt=2)


def assembly(loop: Loop, features: str = "") -> str:
    """The machine code as text; features: LLVM's names, with signs, beyond those of this processor."""
    machine = _machine(",".join(filter(None, (features, loop.without))))
    return str(machine.emit_assembly(llvm.parse_assembly(loop.text)))


class Runner:
    """A compiled loop, run on several threads at once; each has its own memory."""

    def __init__(self, loop: Loop) -> None:
        self._per_turn = loop.per_turn
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(loop.text), _machine(loop.without))
        self._engine.finalize_object()
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        self._run = kind(self._engine.get_function_address("run"))  # without the interpreter's lock while it runs

    def rate(self, turns: int, sources: Sequence[int], repeats: int, passes: int = 1) -> float:
        """Operations or bytes per second of all threads together, each on its source: the best of the repeats.

        A repeat runs the loop `passes` times, from the first thread's start to the last one's end.
        """
        barrier = threading.Barrier(len(sources))
        begins, ends = ([[0.0] * len(sources) for _ in range(repeats)] for _ in range(2))

        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

        def work(number: int) -> None:
            if number < len(cores):  # this thread's core; two threads may share one for a while otherwise
                os.sched_setaffinity(0, {cores[number]})
            result = ctypes.create_string_buffer(2 * _LINE)
            for repeat in range(repeats):
                barrier.wait()
                begins[repeat][number] = time.perf_counter()
                for _ in range(passes):
                    self._run(turns, sources[number], ctypes.addressof(result))
                ends[repeat][number] = time.perf_counter()

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(sources))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = min(max(end) - min(begin) for begin, end in zip(begins, ends, strict=True))
        return len(sources) * passes * turns * self._per_turn / seconds
