"""Weights that stay in their file: where their rows lie, and the file as memory, which the system reads on demand."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from executor_svc.device.kernels import WeightRows


class NotInPlaceError(ValueError):
    """A weight cannot be used as it lies in its file; the message says why."""


@dataclass(frozen=True, slots=True)
class FileRows:
    """The rows of a weight, one after the other in a file, or evenly apart."""

    path: Path
    offset: int
    num_bytes: int
    """From the first one's beginning to the last one's end."""
    stored_as: str
    """The file's name of the type, such as BF16 or Q4_K."""
    stride: int = 0
    """Bytes from a row to the next; 0: as many as it has."""
    scales: FileRows | None = None
    """Where the type's scales are, if they have a place of their own."""


@runtime_checkable
class InFile(Protocol):
    """A stored weight, dense or in few bits."""

    def in_file(self) -> FileRows | None:
        """Return where its rows lie as they are; None: they are made of something else, or lie in another order."""
        ...


@runtime_checkable
class Stacked(Protocol):
    """A dense weight of stored tensors, one below the other."""

    @property
    def stored(self) -> Sequence[WeightRows]: ...


class MappedFiles:
    """Files as memory. Nothing of them is private: the system takes pages back, and reads them again."""

    def __init__(self) -> None:
        self._files: dict[Path, Tensor] = {}
        self._stamps: dict[Path, tuple[int, int, int, int]] = {}
        self.num_bytes = 0
        """Of the rows that were asked for."""

    def memory(self, rows: FileRows) -> Tensor:
        """Return rows as [num_bytes] uint8, not to be written to. Raises NotInPlaceError for a file that has less."""
        if rows.path not in self._files:
            with rows.path.open("rb") as file:
                self._stamps[rows.path] = _stamp(os.fstat(file.fileno()))
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with warnings.catch_warnings(action="ignore"):  # PyTorch's, for it cannot refuse writes
                self._files[rows.path] = torch.frombuffer(mapped, dtype=torch.uint8)
        memory = self._files[rows.path][rows.offset : rows.offset + rows.num_bytes]
        if len(memory) < rows.num_bytes:
            raise NotInPlaceError(f"{rows.path}: the file ends within it")
        self.num_bytes += rows.num_bytes
        return memory

    def check_unchanged(self) -> None:
        """Raise NotInPlaceError if a file was replaced, cut or written to since it is mapped."""
        for path, stamp in self._stamps.items():
            try:
                now = _stamp(path.stat())
            except OSError as error:
                raise NotInPlaceError(f"{path}: cannot be read: {error.strerror or error}") from error
            if now != stamp:
                raise NotInPlaceError(f"{path}: the file has changed while it was read; start again")


def _stamp(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
