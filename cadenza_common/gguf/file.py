"""Reads the header of a GGUF file: its metadata, and where its tensors lie. Needs no torch; no tensor is read.

The format is ggml's (github.com/ggml-org/ggml/blob/master/docs/gguf.md). A header may be hostile: each count and length
is held against the bytes that are left and against a limit before anything is read for it, and each tensor lies within
its file.
"""

from __future__ import annotations

import math
import os
import re
import struct
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cadenza_common.gguf.metadata import GgufError, GgufMetadata, MetadataValue
from cadenza_common.lfs_pointers import LFS_WORDS, is_lfs_pointer

__all__ = ["GgufError", "GgufFile", "GgufMetadata", "GgufTensor", "TensorType", "find_gguf", "read_gguf"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 1 << 26
"""The header of a model with 260000 tokens has 16 MB."""
_MAX_PAIRS = 1 << 14
_MAX_TENSORS = 1 << 16
_MAX_ITEMS = 1 << 21
"""Of all arrays together: each becomes an object. Vocabularies of 260000 tokens have 1.3 million with their merges."""
_MAX_KEY_BYTES = 65_535
_MAX_NAME_BYTES = 127
_MAX_DIMENSIONS = 4
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""Codes of `struct` and `array` by the number of a value's type."""

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TensorType:
    """How the numbers of a tensor are stored: blocks of consecutive columns of a row."""

    name: str
    block_columns: int
    block_bytes: int


TENSOR_TYPES = {
    number: TensorType(name, columns, size)
    for number, name, columns, size in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}
"""ggml's types by number, as of gguf 0.19, except those of activations; the executor decides which ones can be run."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file."""

    path: Path
    name: str
    type: TensorType
    shape: tuple[int, ...]
    """Rows first, as PyTorch has it; the file has it in reverse."""
    offset: int
    """Of its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.block_columns * self.type.block_bytes


Stamp = tuple[int, int, int, int]
"""Device, inode, bytes and time of the last change of a file."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a model's file; of a model in several files, that of the first with the tensors of all."""

    paths: tuple[Path, ...]
    metadata: GgufMetadata
    tensors: dict[str, GgufTensor]
    stamps: tuple[Stamp, ...]
    """Of the files when their headers were read."""

    def check_unchanged(self) -> None:
        """Raise GgufError if a file was replaced or written to since its header was read."""
        for path, stamp in zip(self.paths, self.stamps, strict=True):
            try:
                now = _stamp(path.stat())
            except OSError as error:
                raise GgufError(f"{path}: cannot be read: {error.strerror or error}") from error
            if now != stamp:
                raise GgufError(f"{path}: the file has changed while it was read; start again")


def find_gguf(model: str | os.PathLike[str]) -> Path | None:
    """Return the GGUF file of a model: the file itself, or that of a folder without config.json; None: it has none.

    Raises GgufError if a folder holds several.
    """
    path = Path(model).expanduser()
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    names = sorted(each.name for each in path.glob("*.gguf") if each.is_file())
    first = [name for name in names if (split := _SPLIT_NAME.fullmatch(name)) is None or int(split["number"]) == 1]
    if len(first) > 1:
        raise GgufError(f"model folder {path}: it holds several GGUF files: {', '.join(first)}; give one of them")
    return path / (first or names)[0] if names else None


def read_gguf(path: Path) -> GgufFile:
    """Return the header of a file, or of all files of a model that is split into name-00001-of-0000N.gguf and so on.

    Raises GgufError, which names the file and what is wrong in it.
    """
    metadata, tensors, stamp = _read_one(path)
    stamps = [stamp]
    split = _SPLIT_NAME.fullmatch(path.name)
    count = metadata.integer("split.count", 1, at_least=0)
    if count <= 1:
        return GgufFile((path,), metadata, tensors, (stamp,))
    if split is None or int(split["count"]) != count:
        raise GgufError(f"{path}: a part of {count}, but its name does not end in -00001-of-{count:05}.gguf")
    paths = [path.with_name(f"{split['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if metadata.integer("split.no", at_least=0) != 0 or path != paths[0]:
        raise GgufError(f"{path}: a later part of a model of {count} files; give the first, {paths[0].name}")
    for number, part in enumerate(paths[1:], 1):
        other, more, stamp = _read_one(part)
        stamps.append(stamp)
        if (other.integer("split.no", at_least=0), other.integer("split.count", at_least=0)) != (number, count):
            raise GgufError(f"{part}: not part {number + 1} of {count} by its split.no and split.count")
        twice = next((name for name in more if name in tensors), None)
        if twice is not None:
            raise GgufError(f"{part}: tensor {twice} is in {tensors[twice].path.name} too")
        tensors |= more
    whole = metadata.integer("split.tensors.count", len(tensors))
    if whole != len(tensors):
        raise GgufError(f"{path}: its {count} files hold {len(tensors)} tensors, split.tensors.count says {whole}")
    return GgufFile(tuple(paths), metadata, tensors, tuple(stamps))


def _read_one(path: Path) -> tuple[GgufMetadata, dict[str, GgufTensor], Stamp]:
    try:
        with path.open("rb") as file:
            return *_Header(path, file).read(), _stamp(os.fstat(file.fileno()))
    except OSError as error:
        raise GgufError(f"{path}: cannot be read: {error.strerror or error}") from error


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class _Header:
    """Reads one file's header from its beginning."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._position = 0
        self._limit = min(self._size, _MAX_HEADER_BYTES)
        self._items = 0
        self._what = "its header"

    def read(self) -> tuple[GgufMetadata, dict[str, GgufTensor]]:
        num_tensors, num_pairs = self._counts()
        metadata = GgufMetadata(self._path, dict(self._pairs(num_pairs)))
        alignment = metadata.integer("general.alignment", _DEFAULT_ALIGNMENT)
        if alignment & (alignment - 1) or alignment > _MAX_HEADER_BYTES:
            raise self._error(f"general.alignment is {alignment}, not a power of 2 of at most {_MAX_HEADER_BYTES}")
        tensors = list(self._tensors(num_tensors))
        data = -(-self._position // alignment) * alignment
        return metadata, self._placed(tensors, data, alignment)

    def _counts(self) -> tuple[int, int]:
        """Return the numbers of tensors and of pairs of metadata."""
        if self._size < len(_MAGIC) or self._take(len(_MAGIC)) != _MAGIC:
            pointer = f"it is {LFS_WORDS}" if is_lfs_pointer(self._path) else "it does not begin with GGUF"
            raise self._error(f"not a GGUF file: {pointer if self._size else 'it is empty'}")
        version = self._integer("I")
        if version not in _VERSIONS:
            what = "is in big-endian byte order" if version and version & 0xFFFF == 0 else f"has version {version}"
            raise self._error(f"the file {what}; supported: little-endian files of versions 2 and 3")
        num_tensors, num_pairs = self._integer("Q"), self._integer("Q")
        for count, least, most, what in (
            (num_pairs, _MIN_PAIR_BYTES, _MAX_PAIRS, "pairs of metadata"),
            (num_tensors, _MIN_TENSOR_BYTES, _MAX_TENSORS, "tensors"),
        ):
            if count * least > self._limit - self._position:
                raise self._error(f"the header states {count} {what}: more than fit in it")
            if count > most:
                raise self._error(f"the header states {count} {what}; at most {most} are supported")
        return num_tensors, num_pairs

    def _pairs(self, count: int) -> Iterator[tuple[str, MetadataValue]]:
        seen: set[str] = set()
        for index in range(count):
            self._what = f"key {index + 1} of {count} of the metadata"
            key = self._string(_MAX_KEY_BYTES)
            self._what = f"the value of {_shown(key)}"
            if key in seen:
                raise self._error(f"the metadata has {_shown(key)} twice")
            seen.add(key)
            yield key, self._value(self._integer("I"))

    def _value(self, kind: int) -> MetadataValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self._error(f"{self._what} has the unknown type {kind}")
        (number,) = self._unpack(_SCALARS[kind])
        return bool(number) if kind == _BOOL else number

    def _array(self) -> MetadataValue:
        kind, count = self._integer("I"), self._integer("Q")
        if kind != _STRING and kind not in _SCALARS:
            raise self._error(f"{self._what} is an array of the type {kind}, which is not supported")
        item = 8 if kind == _STRING else struct.calcsize(f"<{_SCALARS[kind]}")
        self._fits(count * item)
        self._items += count
        if self._items > _MAX_ITEMS:
            raise self._error(
                f"the arrays up to {self._what} have {self._items} items; at most {_MAX_ITEMS} are supported"
            )
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        numbers = array(_SCALARS[kind], self._take(count * item))
        if sys.byteorder == "big":
            numbers.byteswap()
        return list(map(bool, numbers)) if kind == _BOOL else numbers.tolist()

    def _tensors(self, count: int) -> Iterator[GgufTensor]:
        """Yield tensors with their offsets from the first."""
        for index in range(count):
            self._what = f"the entry of tensor {index + 1} of {count}"
            name = self._string(_MAX_NAME_BYTES)
            self._what = f"the entry of tensor {_shown(name)}"
            dimensions = self._integer("I")
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise self._error(f"tensor {_shown(name)} has {dimensions} dimensions; supported: 1 to 4")
            sizes = self._unpack(f"{dimensions}Q")
            number, offset = self._integer("I"), self._integer("Q")
            kind = TENSOR_TYPES.get(number)
            if kind is None:
                raise self._error(f"tensor {_shown(name)} has the unknown type {number}")
            shape = tuple(reversed(sizes))
            if 0 in shape or math.prod(shape) > sys.maxsize:
                raise self._error(f"tensor {_shown(name)} has the impossible shape {list(shape)}")
            if shape[-1] % kind.block_columns:
                raise self._error(
                    f"tensor {_shown(name)} has rows of {shape[-1]} columns, {kind.name} has blocks of "
                    f"{kind.block_columns}"
                )
            yield GgufTensor(self._path, name, kind, shape, offset)

    def _placed(self, tensors: list[GgufTensor], data: int, alignment: int) -> dict[str, GgufTensor]:
        """Return the tensors by name with their offsets in the file; data: where the first may begin."""
        placed: dict[str, GgufTensor] = {}
        end, before = 0, ""
        for tensor in sorted(tensors, key=lambda each: each.offset):
            name = _shown(tensor.name)
            if tensor.name in placed:
                raise self._error(f"tensor {name} is there twice")
            if tensor.offset % alignment:
                raise self._error(f"tensor {name} begins at {tensor.offset}, no multiple of the alignment {alignment}")
            if tensor.offset < end:
                raise self._error(f"tensor {name} overlaps tensor {before}")
            end, before = tensor.offset + tensor.num_bytes, name
            if data + end > self._size:
                raise self._error(
                    f"tensor {name} ends at byte {data + end}, the file at {self._size}: truncated, or of another size"
                )
            placed[tensor.name] = GgufTensor(tensor.path, tensor.name, tensor.type, tensor.shape, data + tensor.offset)
        return placed

    def _string(self, at_most: int = _MAX_HEADER_BYTES) -> str:
        length = self._integer("Q")
        if length > at_most:
            raise self._error(f"{self._what} has a string of {length} bytes; at most {at_most} are supported")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise self._error(f"{self._what} is not UTF-8") from None

    def _integer(self, code: str) -> int:
        (number,) = self._unpack(code)
        return int(number)

    def _unpack(self, code: str) -> tuple[int, ...]:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))

    def _fits(self, count: int) -> None:
        """Raise GgufError unless the header has `count` more bytes."""
        if self._position + count <= self._limit:
            return
        if self._position + count <= self._size:
            raise self._error(f"{self._what} exceeds the largest header supported, {_MAX_HEADER_BYTES} bytes")
        raise self._error(
            f"the file ends within {self._what}, which has {count} bytes more from byte {self._position} on: truncated"
        )

    def _take(self, count: int) -> bytes:
        self._fits(count)
        taken = self._file.read(count)
        if len(taken) != count:
            raise self._error(f"the file ends within {self._what}: it has become shorter")
        self._position += count
        return taken

    def _error(self, problem: str) -> GgufError:
        return GgufError(f"{self._path}: {problem}")


def _shown(name: str) -> str:
    """Return a name of the file for a message."""
    return name if len(name) <= _MAX_NAME_BYTES and name.isprintable() else ascii(name[:_MAX_NAME_BYTES])
