"""Where the tensors of a safetensors file lie, and plain reads of their bytes.

The file is read and not mapped: no page of it counts as this process's memory, and a file that is cut or overwritten
meanwhile is an error or other numbers, never the end of the process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from executor_svc.device.file_rows import FileRows
from executor_svc.models.folder import LoaderError

LENGTH_BYTES = 8
"""A file begins with the length of its header, little endian."""

_COMPARED_BYTES = 1 << 22
"""Of two tensors, at a time."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorRows(Protocol):
    """A tensor whose rows are read from a file; its methods are as those of `StoredTensor`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def blocks(self, rows: int) -> Iterator[Tensor]: ...

    def row_blocks(self, chosen: range, rows: int) -> Iterator[Tensor]: ...

    def column_blocks(self, chosen: range, rows: int) -> Iterator[Tensor]: ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file."""

    path: Path
    name: str
    stored_as: str
    """The file's name of its dtype."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""

    @property
    def dtype(self) -> torch.dtype | None:
        """PyTorch's dtype; None for a dtype that no model's tensors have."""
        return _DTYPES.get(self.stored_as)

    def blocks(self, rows: int) -> Iterator[Tensor]:
        """Yield `rows` rows at a time, the last time perhaps fewer; a block is valid until the next one.

        Raises LoaderError if the file cannot be read, or has become shorter.
        """
        buffer = torch.empty(min(rows, self.shape[0]), *self.shape[1:], dtype=self.dtype)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset)
                for start in range(0, self.shape[0], rows):
                    block = buffer[: self.shape[0] - start]
                    self._read(file, block)
                    yield block
        except OSError as error:
            raise LoaderError(f"{self.path}: tensor {self.name} cannot be read: {error}") from error

    def whole(self) -> Tensor:
        """Return the tensor, in memory of its own; errors as those of `blocks`."""
        if not self.shape or not self.shape[0]:
            alone = StoredTensor(self.path, self.name, self.stored_as, (1, *self.shape), self.offset)
            return next(alone.blocks(1))[0]
        return next(self.blocks(self.shape[0]))

    def rows_alone(self, chosen: range) -> StoredTensor:
        """Return some consecutive rows as a tensor."""
        count = math.prod(self.shape[1:]) * self._item_bytes
        return replace(self, shape=(len(chosen), *self.shape[1:]), offset=self.offset + chosen.start * count)

    def matrix(self, index: int) -> StoredTensor:
        """Return one matrix of a tensor of several; raises LoaderError if it has no such one."""
        if len(self.shape) != 3 or index >= self.shape[0]:
            raise LoaderError(f"{self.path}: tensor {self.name} has shape {list(self.shape)}, and no matrix {index}")
        alone = self.rows_alone(range(index, index + 1))
        return replace(alone, name=f"{self.name}[{index}]", shape=self.shape[1:])

    def in_file(self) -> FileRows:
        """Return where its rows lie."""
        return FileRows(self.path, self.offset, math.prod(self.shape) * self._item_bytes, self.stored_as)

    def row_blocks(self, chosen: range, rows: int) -> Iterator[Tensor]:
        """Yield some consecutive rows, `rows` at a time; nothing else is read. Otherwise as `blocks`."""
        return self.rows_alone(chosen).blocks(rows) if len(chosen) else iter(())

    def column_blocks(self, chosen: range, rows: int) -> Iterator[Tensor]:
        """Yield some consecutive columns of a matrix, `rows` rows at a time; nothing else is read; as `blocks`."""
        num_rows, num_columns = self.shape
        buffer = torch.empty(min(rows, num_rows), len(chosen), dtype=self.dtype)
        try:
            with self.path.open("rb", buffering=0) as file:
                for start in range(0, num_rows, rows):
                    block = buffer[: num_rows - start]
                    for index, row in enumerate(block, start):
                        file.seek(self.offset + (index * num_columns + chosen.start) * self._item_bytes)
                        self._read(file, row)
                    yield block
        except OSError as error:
            raise LoaderError(f"{self.path}: tensor {self.name} cannot be read: {error}") from error

    @property
    def _item_bytes(self) -> int:
        assert self.dtype is not None
        return self.dtype.itemsize

    def _read(self, file: Any, block: Tensor) -> None:
        bytes_left = block.reshape(-1).view(torch.uint8).numpy().data
        while bytes_left:
            count = file.readinto(bytes_left)
            if not count:
                raise LoaderError(f"{self.path}: tensor {self.name} cannot be read: the file ends within it")
            bytes_left = bytes_left[count:]


def is_same_content(one: StoredTensor, other: StoredTensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether two tensors are equal: byte by byte, or as they are in a dtype; both are read up to a difference.

    Raises LoaderError for a file that cannot be read.
    """
    if one.shape != other.shape or (dtype is None and one.stored_as != other.stored_as):
        return False
    if one.dtype is None or other.dtype is None:
        return False
    if not one.shape:
        pairs = iter([(one.whole().reshape(1), other.whole().reshape(1))])
    else:
        rows = max(1, _COMPARED_BYTES // max(1, math.prod(one.shape[1:]) * one.dtype.itemsize))
        pairs = zip(one.blocks(rows), other.blocks(rows), strict=True)
    if dtype is None:
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    return all(torch.equal(a.to(dtype), b.to(dtype)) for a, b in pairs)


def is_without_effect(stored: StoredTensor) -> bool:
    """Return whether a tensor that no model reads changes nothing: it is empty, or a bias that is 0.

    AutoGPTQ and AutoAWQ store biases of 0 for all linears. Raises LoaderError for a file that cannot be read.
    """
    if 0 in stored.shape:
        return True
    if not stored.name.endswith(".bias") or len(stored.shape) != 1 or stored.dtype is None:
        return False
    return not any(bool(block.any()) for block in stored.blocks(_COMPARED_BYTES // stored.dtype.itemsize))


def tensors_of(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name; raises LoaderError for a file that is no safetensors file."""
    try:
        with safe_open(path, framework="pt"):  # checks the header against the file
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        data = LENGTH_BYTES + length
        return {name: _stored(path, name, entry, data) for name, entry in header.items()}
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise LoaderError(f"{path}: not a readable safetensors file: {error}") from error


def _stored(path: Path, name: str, entry: dict[str, Any], data: int) -> StoredTensor:
    """Return a tensor of the header; data: offset of the first tensor."""
    stored = StoredTensor(path, name, entry["dtype"], tuple(int(size) for size in entry["shape"]), data)
    begin, end = entry["data_offsets"]
    if stored.dtype is not None and end - begin != math.prod(stored.shape) * stored.dtype.itemsize:
        raise ValueError(f"tensor {name} has {end - begin} bytes for shape {list(stored.shape)}")
    return replace(stored, offset=data + begin)
