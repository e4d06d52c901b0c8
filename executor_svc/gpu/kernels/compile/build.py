"""Compiles one kernel ahead of time, without a GPU.

Triton and the ptxas of its package produce the machine code that a GPU would run. ptxas reports its properties without
a GPU: registers, shared memory, spills, and the instructions of products.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from triton import compile as triton_compile
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from executor_svc.gpu.kernels.compile.machine_code import disassembled, instructions, num_overlapped, touching
from executor_svc.gpu.kernels.compile.registry import variant_errors
from executor_svc.gpu.kernels.variant import Variant

MAX_SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Maximum shared memory of a block in bytes, by arch (CUDA C++ Programming Guide, technical specifications)."""


_FIRST = re.compile(
    r"(?P<P>\bprefetch\.global\.L2\b)|(?P<W>\bgriddepcontrol\.wait\b)"
    r"|(?P<L>\bgriddepcontrol\.launch_dependents\b)"
    r"|(?P<M>\b(?:ld|st|atom|red)\.[\w.:]*global\b|\bcp\.(?:async|reduce)\b|\bbra\b|\bret\b|\bexit\b|\bcall\b)"
)
"""Instructions of PTX by the letters of `Build.order`."""


@dataclass(frozen=True, slots=True)
class Build:
    """Properties of one variant's machine code for one arch. Memory in bytes, spills and stack per thread."""

    name: str
    arch: int
    num_registers: int
    static_shared: int
    dynamic_shared: int
    stack_frame: int
    spill_stores: int
    spill_loads: int
    wgmma: bool
    """Whether it multiplies with wgmma."""
    wgmma_serialized: bool
    """Whether ptxas has serialized wgmma, for lack of registers."""
    products: Sequence[str]
    """Kinds of instructions of tensor cores, as "mma m16n8k16", sorted."""
    column_warps: int
    """Warps among which a row of a product's result is divided at most; 0: no product is of tensor cores."""
    num_loads: int
    """Instructions that read global memory, including asynchronous copies."""
    num_wide_loads: int
    """Number of these that read 16 bytes at once."""
    num_bulk_copies: int
    """Instructions of the copy engine."""
    role_registers: Sequence[int]
    """Numbers of registers that warps of a role have, sorted; empty: no warps have roles."""
    num_barriers: int
    """Barriers that copies or warps arrive at (mbarrier)."""
    num_overlapped: int
    """Exponents of a thread between its waits for the second last product and for the last one, the least of all loops.

    0 too where it was not asked for, as the next.
    """
    num_touching: int
    """Instructions that name registers of a product which may still run."""
    order: str
    """What it does first that counts for the kernels beside it, a letter each, up to the first M.

    P: asks for memory; W: waits for the kernel before; L: lets the next begin; M: accesses memory, branches or ends.
    """
    seconds: float
    """Seconds of the compilation."""

    @property
    def shared(self) -> int:
        """Shared memory of a block, bytes."""
        return self.static_shared + self.dynamic_shared

    @property
    def spills(self) -> int:
        """Bytes that a thread spills: stores to local memory and loads, for lack of registers."""
        return self.spill_stores + self.spill_loads


class CompileError(RuntimeError):
    """A variant does not compile; the message names the variant."""


def compile_variant(variant: Variant, arch: int) -> Build:
    """Compile a variant for sm_`arch`, without any cache.

    Raises CompileError, which names the variant, and RuntimeError under Triton's interpreter.
    """
    start = time.perf_counter()
    compiled, log = _compiled(variant, arch)
    seconds = time.perf_counter() - start
    facts = _ptxas_facts(_where(variant, arch), log) | _ptx_facts(compiled.asm["ptx"])
    facts["column_warps"] = _column_warps(compiled.asm["ttgir"])
    listed = instructions(disassembled(compiled.asm["cubin"])) if variant.roles else []
    facts |= {"num_overlapped": num_overlapped(listed), "num_touching": len(touching(listed))}
    return Build(variant.name, arch, dynamic_shared=compiled.metadata.shared, seconds=round(seconds, 2), **facts)


def machine_code(variant: Variant, arch: int) -> str:
    """Return the instructions that a GPU would run (SASS), as cuobjdump prints them; raises as `compile_variant`."""
    return disassembled(_compiled(variant, arch)[0].asm["cubin"])


def _where(variant: Variant, arch: int) -> str:
    return f"{variant.name} for sm_{arch}"


def _compiled(variant: Variant, arch: int) -> tuple[Any, str]:
    """Return what Triton compiles, and the output of ptxas."""
    if not isinstance(variant.kernel, JITFunction):
        raise RuntimeError("kernels are not compiled under TRITON_INTERPRET: compile in a process without it")
    where = _where(variant, arch)
    if wrong := variant_errors(variant):
        raise CompileError(f"{where}: {'; '.join(wrong)}")
    source = GluonASTSource if variant.kernel.is_gluon() else ASTSource
    with _fresh_compiler() as printed:
        try:
            compiled = triton_compile(
                source(variant.kernel, dict(variant.signature), dict(variant.constants), _attributes(variant)),
                target=GPUTarget("cuda", arch, 32),
                options={
                    "num_warps": variant.num_warps,
                    "num_stages": variant.num_stages,
                    "enable_fp_fusion": variant.fp_fusion,
                    "maxnreg": variant.max_registers,
                },
            )
        except Exception as error:
            raise CompileError(f"{where}: {type(error).__name__}: {error}") from error
    return compiled, printed.getvalue()


def build_errors(variant: Variant, build: Build) -> list[str]:
    """Return the reasons that a build cannot be launched or misses a requirement of its variant.

    The list is empty if there is none.
    """
    found = []
    if variant.no_spills and build.spills:
        found.append(
            f"spills {build.spill_stores} bytes of stores and {build.spill_loads} of loads"
            f" (registers {build.num_registers}), and must not"
        )
    if variant.wgmma and build.arch == 90 and not build.wgmma:
        found.append("has no wgmma in its PTX, and must")
    if variant.wgmma and build.arch == 90 and build.wgmma_serialized:
        found.append("has wgmma, but ptxas serializes it")
    wanted = variant.products.get(build.arch, frozenset(build.products))
    if wanted != {*build.products}:
        found.append(f"multiplies by {', '.join(build.products) or 'nothing'}, and must by {', '.join(sorted(wanted))}")
    if variant.whole_rows and build.arch == 90 and build.column_warps > 1:
        found.append(f"divides rows of products among {build.column_warps} warps, and must not")
    if variant.copies and build.arch == 90 and not build.num_bulk_copies:
        found.append("has no instruction to the copy engine in its PTX, and must")
    narrow = build.num_loads - build.num_wide_loads
    if variant.narrow_loads is not None and narrow > variant.narrow_loads:
        found.append(
            f"reads less than 16 bytes at once with {narrow} instructions, and may with {variant.narrow_loads}"
        )
    if variant.roles and build.arch == 90:
        if not build.role_registers or not build.num_barriers:
            found.append("has no registers by role or no barriers in its PTX, and must")
        if not build.num_overlapped:
            found.append("computes no exponents while a product runs, and must")
        if build.num_touching:
            found.append(f"touches registers of products that may still run, {build.num_touching} times")
    if variant.dependent and not re.fullmatch("P*WLM", build.order):
        found.append(f"begins with {build.order}, and must wait before all but prefetches, and then let the next begin")
    if build.shared > MAX_SHARED[build.arch]:
        found.append(f"needs {build.shared} bytes of shared memory; a block has {MAX_SHARED[build.arch]}")
    return found


@contextlib.contextmanager
def _fresh_compiler() -> Iterator[io.StringIO]:
    """Set up a temporary empty cache; yields the output of ptxas and Triton."""
    printed = io.StringIO()
    with (
        tempfile.TemporaryDirectory(prefix="cadenza-kernels-") as folder,
        knobs.cache.scope(),
        knobs.compilation.scope(),
        knobs.nvidia.scope(),
        contextlib.redirect_stdout(printed),
    ):
        knobs.cache.dir = folder
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        yield printed


def _attributes(variant: Variant) -> dict[tuple[int], list[list[Any]]]:
    """Return divisibility in the form of Triton's compiler: by argument index."""
    return {(variant.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible}


def _ptxas_facts(where: str, log: str) -> dict[str, Any]:
    """Parse the output of `ptxas -v` for the kernel and the functions it calls: most registers, sum of all spills."""

    def numbers(pattern: str) -> list[int]:
        return [int(number) for number in re.findall(pattern, log)]

    registers = numbers(r"Used (\d+) registers")
    stores = numbers(r"(\d+) bytes spill stores")
    loads = numbers(r"(\d+) bytes spill loads")
    if not registers or not stores or not loads:
        raise CompileError(f"{where}: ptxas reports no registers and spills: {log[:500]!r}")
    return {
        "num_registers": max(registers),
        "static_shared": sum(numbers(r"(\d+) bytes smem")),
        "stack_frame": max(numbers(r"(\d+) bytes stack frame"), default=0),
        "spill_stores": sum(stores),
        "spill_loads": sum(loads),
        "wgmma_serialized": "wgmma.mma_async instructions are serialized" in log,
    }


def _column_warps(ttgir: str) -> int:
    """Return the most warps along the columns of a layout of tensor cores."""
    layouts = re.findall(r"nvidia_mma<\{[^}]*warpsPerCTA = \[\d+, (\d+)\]", ttgir)
    return max((int(columns) for columns in layouts), default=0)


def _ptx_facts(ptx: str) -> dict[str, Any]:
    """Count instructions in the PTX."""
    copies = re.findall(r"cp\.async\.c[ag]\.shared[^;]*?\], *(0x[0-9a-f]+|\d+)", ptx)
    loads = re.findall(r"\bld\.(?:volatile\.|relaxed\.|acquire\.)?global([\w.:]*)", ptx)
    wide = re.compile(r".*\.(v4\.[bfus]32|v2\.[bfus]64)")
    kinds = re.findall(r"\b(wgmma|mma)\.(?:mma_async\.)?(?:sync\.)?(?:aligned\.)?(m\d+n\d+k\d+)", ptx)
    return {
        "wgmma": "wgmma.mma_async" in ptx,
        "products": sorted({f"{name} {shape}" for name, shape in kinds}),
        "num_loads": len(copies) + len(loads),
        "num_wide_loads": sum(int(size, 0) == 16 for size in copies)
        + sum(bool(wide.fullmatch(kind)) for kind in loads),
        "num_bulk_copies": len(re.findall(r"cp\.async\.bulk\.tensor\S*shared\S*global", ptx)),
        "role_registers": sorted({int(count) for count in re.findall(r"setmaxnreg\.\S+\s+(\d+)", ptx)}),
        "num_barriers": len(re.findall(r"mbarrier\.init", ptx)),
        "order": _order(ptx),
    }


def _order(ptx: str) -> str:
    """Return `Build.order`: of the text, in which all that precedes the first branch is run first."""
    found = ""
    for letter in (each.lastgroup or "" for each in _FIRST.finditer(ptx)):
        found += letter
        if letter == "M":
            break
    return found
