"""Panels of weights that lie in files: each is made of its rows when a product needs it, in memory of the thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import Emitter, Int
from executor_svc.cpu.kernels.panel_layout import PANEL, UNIT_BYTES
from executor_svc.cpu.kernels.panels import write_panels
from executor_svc.cpu.kernels.quantized.few_rows import format_key
from executor_svc.cpu.kernels.quantized.files.block_types import READERS, READERS_APART, BlockReader, FileBlock, Numbers
from executor_svc.cpu.kernels.quantized.layout import STEP, WORD_BYTES, PackedLayout
from executor_svc.cpu.kernels.quantized.packing import pack_words

DENSE = {"F32": "float32", "BF16": "bfloat16"}
"""Dtypes of dense rows that need no change, by their names in files."""
_MAKE = Callable[..., None]


@dataclass(frozen=True, slots=True)
class FilePanels:
    """How a panel is made of rows of a weight in a file."""

    stored_as: str
    rows: int
    """Of the weight."""
    row_bytes: int
    """From a row to the next in the file."""
    panel_bytes: int
    layout: PackedLayout | None
    """None: the rows are dense."""
    scales_row_bytes: int = 0
    """Likewise, of scales that have a place of their own; 0: they have none."""

    @property
    def key(self) -> str:
        """All that the code depends on."""
        kind = self.stored_as if self.layout is None else f"{self.stored_as}_{format_key(self.layout)}"
        return f"{kind}_{self.rows}_{self.row_bytes}_{self.scales_row_bytes}".replace(" ", "_")

    def make(self, code: Code, emit: Emitter, weight: Int, scales: Int, panel: Int, target: Int) -> None:
        """Emit: write a panel of the weight, whose rows and scales begin at these addresses, to `target`."""
        first = panel * PANEL
        here, start = (emit.integer(self.rows) - first).least(PANEL), weight + first * self.row_bytes
        if self.layout is None:
            _dense(code, self.row_bytes)(emit, start, target, here)
        else:
            writer = _blocks(code, self, self.layout)
            writer(emit, start, scales + first * self.scales_row_bytes, target, here)


def reader_of(stored_as: str) -> BlockReader | None:
    """Return what reads the blocks of a type in a file; None: nothing does."""
    return READERS.get(stored_as) or READERS_APART.get(stored_as)


def _dense(code: Code, row_bytes: int) -> _MAKE:
    def body(emit: Emitter, source: Int, target: Int, rows: Int) -> None:
        write_panels(emit, source, target, emit.integer(0), rows, emit.integer(row_bytes // UNIT_BYTES))

    return code.helper(f"panel_of_rows_{row_bytes}", 3, body)


def _blocks(code: Code, made: FilePanels, layout: PackedLayout) -> _MAKE:
    reader = reader_of(made.stored_as)
    assert reader is not None

    def body(emit: Emitter, source: Int, scales: Int, target: Int, rows: Int) -> None:
        codes = emit.builder.alloca(ir.VectorType(ir.IntType(8), STEP))
        codes_at = Int(emit, emit.builder.ptrtoint(codes, ir.IntType(64)))

        def store(numbers: Numbers, base: Int, lane: Int) -> None:
            for name, values in numbers.items():
                plane = layout.planes[name]
                for group, value in enumerate(values if isinstance(values, list) else [values]):
                    place = base + (plane.offset + group * PANEL * plane.item_bytes) + lane * plane.item_bytes
                    emit.builder.store(value, emit.pointer(place, value.type)).align = plane.item_bytes

        def row(lane: Int, _: object) -> None:
            start, own_scales = source + lane * made.row_bytes, scales + lane * made.scales_row_bytes

            def block(index: Int, _: object) -> None:
                head = target + index * layout.block_bytes
                here = FileBlock(emit, start + index * reader.num_bytes, own_scales + index * reader.scale_bytes)
                store(reader.head(here), head, lane)
                for step in range(layout.steps_per_block):
                    at = head + (layout.head_bytes + step * layout.step_bytes)
                    values, numbers = reader.step(here, step)
                    emit.builder.store(values, codes)
                    store(numbers, at, lane)
                    pack_words(emit, layout.kind.bits, codes_at, at + layout.high_offset + lane * WORD_BYTES)

            emit.loop(0, layout.num_blocks, 1, block)

        emit.loop(0, rows, 1, row)

    return code.helper(f"panel_of_{made.key}_{layout.num_blocks}", 4, body)
