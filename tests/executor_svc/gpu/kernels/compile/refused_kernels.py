"""Kernels for the tests of compiling: one in order, and one for each reason to be refused."""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.gpu.kernels.variant import Variant


@triton.constexpr_function
def _crash():
    # Imported here, for Triton looks into modules that a function sees outside itself.
    import os

    os.abort()


@triton.jit
def _add_one(target, source, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < size) + 1, mask=at < size)


@triton.jit
def _norm(target, source, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.load(source + at)
    tl.store(target + at, row / tl.sum(row))


@triton.jit
def _product(target, left, right, SIZE: tl.constexpr, STEPS: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for step in range(STEPS):
        place = step * SIZE * SIZE + rows * SIZE + columns
        total = tl.dot(tl.load(left + place), tl.load(right + place), total)
    tl.store(target + rows * SIZE + columns, total)


@triton.jit
def _broken(target):
    tl.store(target, no_such_name)  # noqa: F821


@triton.jit
def _unassembled(target):
    tl.store(
        target, tl.inline_asm_elementwise("no.such.instruction $0;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    )


@triton.jit
def _crashing(target):
    _crash()
    tl.store(target, 1)


def _product_variant(name: str, size: int, num_warps: int, num_stages: int, arch: int, *, wgmma: bool) -> Variant:
    return Variant(
        name=name,
        kernel=_product,
        signature={"target": "*fp32", "left": "*bf16", "right": "*bf16", "SIZE": "constexpr", "STEPS": "constexpr"},
        constants={"SIZE": size, "STEPS": 8},
        divisible=("target", "left", "right"),
        num_warps=num_warps,
        num_stages=num_stages,
        archs=(arch,),
        wgmma=wgmma,
    )


def variants() -> list[Variant]:
    """Crashing first: what comes after it is compiled all the same."""
    out = {"target": "*i32"}
    row = {"target": "*fp32", "source": "*fp32", "BLOCK": "constexpr"}
    add = {"target": "*fp32", "source": "*fp32", "size": "i32", "BLOCK": "constexpr"}
    wide = ("target", "source", "size")
    return [
        Variant("crashing", _crashing, out, {}, archs=(90,)),
        Variant("broken", _broken, out, {}, archs=(80,)),
        Variant("unassembled", _unassembled, out, {}, archs=(90,)),
        Variant("misdescribed", _broken, {"goal": "*i32"}, {}, archs=(90,)),
        Variant(
            "spilling", _norm, row, {"BLOCK": 8192}, ("target", "source"), num_warps=1, archs=(80,), no_spills=True
        ),
        Variant("spilling allowed", _norm, row, {"BLOCK": 8192}, ("target", "source"), num_warps=1, archs=(80,)),
        # Four warps multiply together with wgmma: two cannot.
        _product_variant("without wgmma", 64, 2, 1, 90, wgmma=True),
        _product_variant("with wgmma", 64, 4, 1, 90, wgmma=True),
        _product_variant("greedy", 64, 4, 12, 80, wgmma=False),
        Variant("in order", _add_one, add, {"BLOCK": 1024}, wide, fp_fusion=False, no_spills=True, quick=True),
        Variant("in order narrow", _add_one, add, {"BLOCK": 1024}, archs=(90,)),
    ]
