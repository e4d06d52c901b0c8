"""Emits the codes and scales of GGUF's blocks, as they lie in a file.

As `models.gguf.block_types`, which unpacks the same blocks in PyTorch; layouts are those of ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.emit import Emitter, Int
from executor_svc.cpu.kernels.quantized.layout import STEP, PlaneName

_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_MINUS_ZERO = 8
"""A code of e2m1 that ggml reads as 0."""

Numbers = dict[PlaneName, Any]
"""Numbers of a head, or those of the groups of a step, by the names of planes."""


class FileBlock:
    """Emits reads of one block."""

    def __init__(self, emit: Emitter, start: Int, scales: Int) -> None:
        """scales: where they are, of a type that has them in another place."""
        self._emit, self.builder, self._start, self._scales = emit, emit.builder, start, scales

    def _load(self, at: int, kind: Any) -> Any:
        loaded = self.builder.load(self._emit.pointer(self._start + at, kind))
        loaded.align = 1
        return loaded

    def byte(self, at: int) -> Any:
        """Return a byte as an 8-bit integer."""
        return self._load(at, _I8)

    def byte_apart(self) -> Any:
        """Return the byte of the block that is in another place."""
        loaded = self.builder.load(self._emit.pointer(self._scales, _I8))
        loaded.align = 1
        return loaded

    def half(self, at: int) -> Any:
        """Return the bits of a float16."""
        return self._load(at, _I16)

    def minus_half(self, at: int) -> Any:
        """Return the bits of a float16 with the other sign."""
        return self.builder.xor(self.half(at), _I16(0x8000))

    def bits(self, value: Any, first: int, count: int) -> Any:
        """Return some bits of a byte, or of each byte of a vector."""
        kind = value.type
        moved = self.builder.lshr(value, _every(kind, first)) if first else value
        return self.builder.and_(moved, _every(kind, 2**count - 1))

    def above(self, low: Any, high: Any, width: int) -> Any:
        """Return `high` above `width` bits of `low`."""
        return self.builder.or_(low, self.builder.shl(high, _every(high.type, width)))

    def less(self, value: Any, number: int) -> Any:
        return self.builder.sub(value, _every(value.type, number))

    def bytes(self, at: int, count: int = STEP) -> Any:
        """Return consecutive bytes as a vector."""
        return self._load(at, ir.VectorType(_I8, count))

    def nibbles(self, at: int) -> Any:
        """Return the codes of 16 bytes: the lower halves are the first 16."""
        packed = self.bytes(at, STEP // 2)
        order = ir.Constant(ir.VectorType(_I32, STEP), list(range(STEP)))
        return self.builder.shuffle_vector(self.bits(packed, 0, 4), self.bits(packed, 4, 4), order)

    def mixed_nibbles(self, at: int) -> Any:
        """Return the codes of 16 bytes: two neighbours of each, the lower half first."""
        packed = self.bytes(at, STEP // 2)
        order = [place // 2 + STEP // 2 * (place % 2) for place in range(STEP)]
        lanes = ir.Constant(ir.VectorType(_I32, STEP), order)
        return self.builder.shuffle_vector(self.bits(packed, 0, 4), self.bits(packed, 4, 4), lanes)

    def fifth_bits(self, codes: Any, at: int) -> Any:
        """Return codes with the bit that 4 bytes have for each, from the lowest on, above their four."""
        kind = ir.VectorType(_I32, STEP)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), self._load(at, _I32), _I32(0))
        all_lanes = self.builder.shuffle_vector(one, one, ir.Constant(kind, [0] * STEP))
        moved = self.builder.lshr(all_lanes, ir.Constant(kind, list(range(STEP))))
        bits = self.builder.trunc(moved, ir.VectorType(_I8, STEP))
        return self.above(codes, self.bits(bits, 0, 1), 4)

    def without_minus_zero(self, codes: Any) -> Any:
        zero = self.builder.icmp_signed("==", codes, _every(codes.type, _MINUS_ZERO))
        return self.builder.select(zero, _every(codes.type, 0), codes)


Step = Callable[[FileBlock, int], tuple[Any, Numbers]]


@dataclass(frozen=True, slots=True)
class BlockReader:
    """Reads a type's blocks; each is one block of `quantized.layout`."""

    num_bytes: int
    head: Callable[[FileBlock], Numbers]
    step: Step
    """Of a step of 32 columns: its codes, one in a byte, and the numbers of its one or two groups."""
    scale_bytes: int = 0
    """Of those that a block has in another place."""


def _one_step(codes: Callable[[FileBlock], Any]) -> Step:
    return lambda block, _: (codes(block), {})


def _quarters(block: FileBlock, first: int, step: int) -> Any:
    return block.bits(block.bytes(first + 32 * (step // 4)), 2 * (step % 4), 2)


def _group_nibbles(block: FileBlock, first: int, step: int) -> Any:
    return block.bits(block.bytes(first + 32 * (step // 2)), 4 * (step % 2), 4)


def _six_bits(block: FileBlock, group: int) -> Numbers:
    """Return the scale and the minimum of a group of Q4_K and Q5_K, which lie in 12 bytes from byte 4 on."""
    own, second = block.byte(4 + group % 4), block.byte(8 + group % 4)
    if group < 4:
        return {"scales": [block.bits(own, 0, 6)], "minimums": [block.bits(second, 0, 6)]}
    last = block.byte(8 + group)
    scale = block.above(block.bits(last, 0, 4), block.bits(own, 6, 2), 4)
    minimum = block.above(block.bits(last, 4, 4), block.bits(second, 6, 2), 4)
    return {"scales": [scale], "minimums": [minimum]}


def _q5_k(block: FileBlock, step: int) -> tuple[Any, Numbers]:
    high = block.bits(block.bytes(16), step, 1)
    return block.above(_group_nibbles(block, 48, step), high, 4), _six_bits(block, step)


def _q6_k(block: FileBlock, step: int) -> tuple[Any, Numbers]:
    half, part = divmod(step, 4)
    low = block.bits(block.bytes(64 * half + 32 * (part % 2)), 4 * (part // 2), 4)
    codes = block.above(low, block.bits(block.bytes(128 + 32 * half), 2 * part, 2), 4)
    return codes, {"scales": [block.byte(192 + 2 * step + group) for group in (0, 1)]}


def _q2_k(block: FileBlock, step: int) -> tuple[Any, Numbers]:
    numbers = [block.byte(2 * step + group) for group in (0, 1)]
    return _quarters(block, 16, step), {
        "scales": [block.bits(each, 0, 4) for each in numbers],
        "minimums": [block.bits(each, 4, 4) for each in numbers],
    }


def _q3_k(block: FileBlock, step: int) -> tuple[Any, Numbers]:
    codes = block.above(_quarters(block, 32, step), block.bits(block.bytes(0), step, 1), 2)
    scales = []
    for group in (2 * step, 2 * step + 1):
        low = block.bits(block.byte(96 + group % 8), 4 * (group // 8), 4)
        high = block.bits(block.byte(104 + group % 4), 2 * (group // 4), 2)
        scales.append(block.less(block.above(low, high, 4), 32))
    return codes, {"scales": scales}


def _iq4_xs(block: FileBlock, step: int) -> tuple[Any, Numbers]:
    low = block.bits(block.byte(4 + step // 2), 4 * (step % 2), 4)
    high = block.bits(block.byte(2 + step // 4), 2 * (step % 4), 2)
    return block.nibbles(8 + 16 * step), {"scales": [block.less(block.above(low, high, 4), 32)]}


def _every(kind: Any, number: int) -> Any:
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def _scale(at: int = 0) -> Callable[[FileBlock], Numbers]:
    return lambda block: {"scales": block.half(at)}


def _scale_and_minimum(block: FileBlock) -> Numbers:
    return {"scales": block.half(0), "minimums": block.half(2)}


def _super_scale(at: int) -> Callable[[FileBlock], Numbers]:
    return lambda block: {"super_scales": block.half(at)}


def _both_supers(at: int) -> Callable[[FileBlock], Numbers]:
    return lambda block: {"super_scales": block.half(at), "super_minimums": block.minus_half(at + 2)}


READERS = {
    "Q8_0": BlockReader(34, _scale(), _one_step(lambda b: b.builder.xor(b.bytes(2), _every(b.bytes(2).type, 0x80)))),
    "Q4_0": BlockReader(18, _scale(), _one_step(lambda b: b.nibbles(2))),
    "IQ4_NL": BlockReader(18, _scale(), _one_step(lambda b: b.nibbles(2))),
    "Q4_1": BlockReader(20, _scale_and_minimum, _one_step(lambda b: b.nibbles(4))),
    "Q5_0": BlockReader(22, _scale(), _one_step(lambda b: b.fifth_bits(b.nibbles(6), 2))),
    "Q5_1": BlockReader(24, _scale_and_minimum, _one_step(lambda b: b.fifth_bits(b.nibbles(8), 4))),
    "MXFP4": BlockReader(17, lambda b: {"scales": b.byte(0)}, _one_step(lambda b: b.without_minus_zero(b.nibbles(1)))),
    "Q4_K": BlockReader(144, _both_supers(0), lambda b, step: (_group_nibbles(b, 16, step), _six_bits(b, step))),
    "Q5_K": BlockReader(176, _both_supers(0), _q5_k),
    "Q6_K": BlockReader(210, _super_scale(208), _q6_k),
    "Q2_K": BlockReader(84, _both_supers(80), _q2_k),
    "Q3_K": BlockReader(110, _super_scale(108), _q3_k),
    "IQ4_XS": BlockReader(136, _super_scale(0), _iq4_xs),
    "TQ2_0": BlockReader(66, _scale(64), lambda b, step: (_quarters(b, 0, step), {})),
}
"""By their names in GGUF."""

MXFP4_APART = "MXFP4 with scales apart"
"""As gpt-oss has it in safetensors."""
READERS_APART = {
    MXFP4_APART: BlockReader(
        16, lambda b: {"scales": b.byte_apart()}, _one_step(lambda b: b.mixed_nibbles(0)), scale_bytes=1
    )
}
"""Of types whose scales have a place of their own."""
