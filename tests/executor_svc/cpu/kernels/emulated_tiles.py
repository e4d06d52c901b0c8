"""Tile instructions (AMX) in numpy, called by compiled kernels in place of the processor's. For tests only.

The kernels' own code runs: its loops, addresses, strides and remainders, as LLVM compiles them for this processor. Only
the tile instructions are calls. Whatever would be a fault on a processor is noted in `Tiles.faults`.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from llvmlite import binding as llvm

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.isa import Isa, host_isa
from tests.executor_svc.cpu.kernels.instructions import tile_byte_product, tile_product

_ROW_BYTES, _ROWS, _TILES = 64, 16, 8
_BYTE, _LONG = ctypes.c_uint8, ctypes.c_int64
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ldtilecfg": (_LONG,),
    "tilerelease": (),
    "tilezero": (_BYTE,),
    "tileloadd64": (_BYTE, _LONG, _LONG),
    "tilestored64": (_BYTE, _LONG, _LONG),
    "tdpbf16ps": (_BYTE, _BYTE, _BYTE),
    "tdpbssd": (_BYTE, _BYTE, _BYTE),
    "tdpbsud": (_BYTE, _BYTE, _BYTE),
}


def emulated_isa() -> Isa:
    """Return this processor's instructions and those of tiles."""
    host = host_isa()
    return replace(host, features=host.features | {"amx-bf16", "amx-int8"})


class Tiles:
    """A thread's tile registers."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.counts: Counter[str] = Counter()
        self._shapes: list[tuple[int, int]] = []
        self._data = np.zeros((_TILES, _ROWS, _ROW_BYTES), np.uint8)
        self._callbacks = {name: self._callback(name, kinds) for name, kinds in _ARGUMENTS.items()}

    def begin(self) -> None:
        """Forget what was: a test begins."""
        self.faults.clear()
        self.counts.clear()
        self._tilerelease()

    @property
    def released(self) -> bool:
        return not self._shapes

    def address(self, name: str) -> int:
        """Return the address of a function that does what an instruction does."""
        return ctypes.cast(self._callbacks[name], ctypes.c_void_p).value or 0

    def _callback(self, name: str, kinds: tuple[Any, ...]) -> Any:
        run: Callable[..., None] = getattr(self, f"_{name}")

        def noted(*arguments: int) -> None:
            self.counts[name] += 1
            try:
                run(*arguments)
            except (AssertionError, IndexError) as error:
                self.faults.append(f"{name}{arguments}: {error}")

        return ctypes.CFUNCTYPE(None, *kinds)(noted)

    def _ldtilecfg(self, address: int) -> None:
        config = np.frombuffer(ctypes.string_at(address, 64), np.uint8)
        assert config[0] == 1, "palette"
        assert not any(config[part].any() for part in (slice(1, 16), slice(32, 48), slice(56, 64))), "reserved bytes"
        sizes, rows = config[16:32].view(np.uint16), config[48:56]
        assert max(sizes) <= _ROW_BYTES, "long rows"
        assert max(rows) <= _ROWS, "many rows"
        assert ((sizes > 0) == (rows > 0)).all(), "half a size"
        self._shapes = list(zip(rows.tolist(), sizes.tolist(), strict=True))
        self._data[:] = 0

    def _tilerelease(self) -> None:
        self._shapes = []
        self._data[:] = 0

    def _tilezero(self, tile: int) -> None:
        self._shape(tile)
        self._data[tile] = 0

    def _tileloadd64(self, tile: int, address: int, stride: int) -> None:
        rows, size = self._shape(tile)
        self._data[tile] = 0
        for row in range(rows):
            self._data[tile, row, :size] = np.frombuffer(ctypes.string_at(address + row * stride, size), np.uint8)

    def _tilestored64(self, tile: int, address: int, stride: int) -> None:
        rows, size = self._shape(tile)
        for row in range(rows):
            ctypes.memmove(address + row * stride, self._data[tile, row].ctypes.data, size)

    def _tdpbf16ps(self, total: int, left: int, right: int) -> None:
        rows, inner, right_rows, columns = self._sizes(total, left, right)
        factors = [self._data[tile].view(np.uint16) for tile in (left, right)]
        sums = self._data[total].view(np.float32)
        added = tile_product(
            sums[:rows, : columns // 4], factors[0][:rows, : inner // 2], factors[1][:right_rows, : columns // 2]
        )
        self._data[total] = 0
        sums[:rows, : columns // 4] = added

    def _tdpbssd(self, total: int, left: int, right: int) -> None:
        self._byte_product(total, left, right, np.int8)

    def _tdpbsud(self, total: int, left: int, right: int) -> None:
        self._byte_product(total, left, right, np.uint8)

    def _byte_product(self, total: int, left: int, right: int, kind: type[np.int8] | type[np.uint8]) -> None:
        rows, inner, right_rows, columns = self._sizes(total, left, right)
        sums = self._data[total].view(np.int32)
        factors = self._data[left].view(np.int8)[:rows, :inner], self._data[right].view(kind)[:right_rows, :columns]
        added = tile_byte_product(sums[:rows, : columns // 4], *factors)
        self._data[total] = 0
        sums[:rows, : columns // 4] = added

    def _sizes(self, total: int, left: int, right: int) -> tuple[int, int, int, int]:
        """Return the rows of the result, bytes of a row of the left tile, rows and bytes of a row of the right one."""
        (rows, columns), (left_rows, inner), (right_rows, right_columns) = map(self._shape, (total, left, right))
        assert len({total, left, right}) == 3, "the same tile twice"
        assert (rows, inner, columns) == (left_rows, 4 * right_rows, right_columns), "sizes that do not fit"
        return rows, inner, right_rows, columns

    def _shape(self, tile: int) -> tuple[int, int]:
        assert self._shapes, "no configuration"
        assert self._shapes[tile][0], "a tile without a size"
        return self._shapes[tile]


class EmulatedCode(Code):
    """Compiles kernels whose tile instructions are calls of `tiles`."""

    def __init__(self, tiles: Tiles) -> None:
        super().__init__(emulated_isa())
        self.tiles = tiles

    def _parsed(self) -> Any:
        text = str(self._module)
        for name in _ARGUMENTS:
            own = f"emulated_{name}_{id(self.tiles)}"
            llvm.add_symbol(own, self.tiles.address(name))
            text = text.replace(f'@"llvm.x86.{name}"', f'@"{own}"')
        module = llvm.parse_assembly(text)
        module.verify()
        return module
