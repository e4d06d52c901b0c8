"""`--save-quantized`: writes the weights of `round_to_nearest` as a checkpoint of compressed-tensors, as they are read.

The layout is that of its pack-quantized format: codes in int32 words, the lowest bits first, and scales of groups. A
place in the file is given to each tensor when it is opened, so that threads can write as they read.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from executor_svc.device.stored_linear import QuantBlock, QuantFormat, QuantRows
from executor_svc.models.base import StoredWeight
from executor_svc.models.folder import LoaderError
from executor_svc.models.quantized.round_to_nearest import TABLES, Rounding
from executor_svc.models.safetensors_file import LENGTH_BYTES
from executor_svc.models.specs.file_form import QWEN_MTP_LAYERS_FIELD
from executor_svc.models.specs.spec import LAYER_TABLE, MTP_LAYERS_FIELD

_HEADER_BYTES, _LINEAR_BYTES = 4 << 20, 1 << 10
"""Reserved for the header, which the file begins with, and of that for each linear; spaces follow it."""
_BLOCK_BYTES = 1 << 22
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.int64: "I64"}
_COPIED = ("*.json", "tokenizer*", "*.model", "*.jinja", "vocab*", "merges*")
_MARK = ".cadenza-is-saving"
"""A file of a folder that is not complete: it was made here, and may be removed. Its writer holds a lock of it."""
_NOT_COPIED = ("config.json", "model.safetensors.index.json")


class QuantizedFolder:
    """Implements `round_to_nearest.RoundedListener`: saves what it sees to a new folder.

    Until the end of a `with` block without an error it is FOLDER.partial, which an error removes.
    """

    def __init__(self, target: str, source: Path, rounding: Rounding, dtype: torch.dtype, num_linears: int) -> None:
        """source: the folder of the dense checkpoint; dtype: of its dense matrices.

        Raises LoaderError if the target is there already.
        """
        self._target = Path(target).expanduser()
        self._partial = self._target.with_name(f"{self._target.name}.partial")
        self._source = source
        self._rounding = rounding
        self._dtype = dtype
        self._dense: list[str] = []
        self._tables = list(TABLES)
        if self._target.exists():
            raise LoaderError(f"--save-quantized {target}: it is there already; give a new folder")
        try:
            self._mark = self._make_partial()
            header_bytes = _HEADER_BYTES + num_linears * _LINEAR_BYTES
            self._file = _TensorFile(self._partial / "model.safetensors", header_bytes)
        except OSError as error:
            raise LoaderError(f"--save-quantized {target}: cannot be written: {error}") from error

    def _make_partial(self) -> int:
        """Make the folder anew and return its mark, open and locked; raises LoaderError for a folder of others."""
        mark = self._partial / _MARK
        if self._partial.exists():
            if not mark.is_file():
                raise LoaderError(
                    f"{self._partial} is there, and --save-quantized did not make it; remove or rename it"
                )
            left = self._locked(os.open(mark, os.O_RDWR))
            shutil.rmtree(self._partial)
            os.close(left)
        self._partial.mkdir(parents=True)
        return self._locked(os.open(mark, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))

    def _locked(self, mark: int) -> int:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(mark)
            raise LoaderError(f"--save-quantized {self._target}: another process is writing it") from None
        return mark

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Complete the folder, or remove it after an error; raises LoaderError."""
        complete = False
        try:
            if error is None:
                self._finish()
                complete = True
        finally:
            self._file.close()
            if not complete:
                shutil.rmtree(self._partial, ignore_errors=True)
            os.close(self._mark)

    def dense(self, name: str, stored: StoredWeight) -> StoredWeight:
        """As in `RoundedListener`."""
        if len(stored.shape) == 2:
            self._dense.append(name.removesuffix(".weight"))
        return _SavedWeight(stored, self._file.place(name, stored.shape, self._dtype), self._dtype)

    def kept(self, name: str, tensor: Tensor) -> None:
        """As in `RoundedListener`."""
        if len(tensor.shape) == 2:
            self._dense.append(name.removesuffix(".weight"))
        self._file.place(name, tuple(tensor.shape), tensor.dtype).write(tensor)

    def rounded(self, prefix: str, rows: QuantRows) -> QuantRows:
        """As in `RoundedListener`."""
        count, columns = rows.shape
        self._tables += [prefix] if prefix == LAYER_TABLE else []
        packed = self._file.place(f"{prefix}.weight_packed", (count, columns * rows.format.bits // 32), torch.int32)
        scale = self._file.place(f"{prefix}.weight_scale", (count, columns // rows.format.group), torch.float16)
        self._file.place(f"{prefix}.weight_shape", (2,), torch.int64).write(torch.tensor(rows.shape))
        return _SavedRows(rows, packed, scale)

    def _finish(self) -> None:
        """Write the header, config.json and the tokenizer's files, and give the folder its name; raises LoaderError."""
        try:
            self._file.finish()
            content = json.loads((self._source / "config.json").read_text(encoding="utf-8"))
            content.pop("torch_dtype", None)
            content["dtype"] = str(self._dtype).removeprefix("torch.")
            content["quantization_config"] = _quantization_config(self._rounding, self._dense, self._tables)
            _leave_out_heads(content)
            (self._partial / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            for path in {path for pattern in _COPIED for path in self._source.glob(pattern)}:
                if path.name not in _NOT_COPIED and path.is_file():
                    shutil.copyfile(path, self._partial / path.name)
            _sync(*self._partial.iterdir(), self._partial)
            self._partial.rename(self._target)
            (self._target / _MARK).unlink(missing_ok=True)
            _sync(self._target.parent)
        except OSError as error:
            raise LoaderError(f"--save-quantized {self._target}: cannot be written: {error}") from error


def _leave_out_heads(content: dict[str, Any]) -> None:
    """Let a config.json name no layers of heads: the model does not read them, so they are not saved."""
    text = content.get("text_config")
    for part in (content, text if isinstance(text, dict) else {}):
        part.update({name: 0 for name in (MTP_LAYERS_FIELD, QWEN_MTP_LAYERS_FIELD) if name in part})


def _sync(*paths: Path) -> None:
    """Write files, and the names in folders, to the disk: a machine that loses power keeps them."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


class _TensorFile:
    """A safetensors file whose tensors are written in any order."""

    def __init__(self, path: Path, header_bytes: int) -> None:
        """header_bytes: reserved for the header."""
        self._path, self._header_bytes = path, header_bytes
        self._entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._end = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> _TensorPlace:
        """Return the place of a tensor."""
        begin, self._end = self._end, self._end + math.prod(shape) * dtype.itemsize
        self._entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, self._end]}
        return _TensorPlace(self._path, self._file, LENGTH_BYTES + self._header_bytes + begin)

    def close(self) -> None:
        os.close(self._file)

    def finish(self) -> None:
        """Write the header; raises OSError."""
        header = json.dumps(self._entries).encode()
        if len(header) > self._header_bytes:
            raise OSError(f"{self._path}: too many tensors for its header")
        whole = self._header_bytes.to_bytes(LENGTH_BYTES, "little") + header.ljust(self._header_bytes)
        _write(self._file, memoryview(whole), 0)


def _write(file: int, left: memoryview, offset: int) -> None:
    """Write bytes at an offset of a file; raises OSError."""
    while left:
        count = os.pwrite(file, left, offset)
        offset, left = offset + count, left[count:]


class _TensorPlace:
    """Writes the blocks of a tensor, one after the other."""

    def __init__(self, path: Path, file: int, offset: int) -> None:
        self._path = path
        self._file = file
        self._offset = offset

    def write(self, block: Tensor) -> None:
        left = block.contiguous().reshape(-1).view(torch.uint8).numpy().data
        try:
            _write(self._file, left, self._offset)
            self._offset += len(left)
        except OSError as error:
            raise LoaderError(f"--save-quantized: {self._path} cannot be written: {error}") from error


class _SavedWeight:
    """Implements `models.base.StoredWeight`."""

    def __init__(self, stored: StoredWeight, place: _TensorPlace, dtype: torch.dtype) -> None:
        self._stored = stored
        self._place = place
        self._dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._stored.shape

    def blocks(self, rows: int) -> Iterator[Tensor]:
        for block in self._stored.blocks(rows):
            self._place.write(block.to(self._dtype))
            yield block

    def whole(self) -> Tensor:
        row_bytes = max(1, math.prod(self.shape[1:]) * self._dtype.itemsize)
        rows = max(1, _BLOCK_BYTES // row_bytes)
        return torch.cat([block.clone() for block in self.blocks(rows)])


class _SavedRows:
    """Implements `QuantRows`."""

    column_order: Tensor | None = None
    whole_row_activations: bool = False

    def __init__(self, rows: QuantRows, packed: _TensorPlace, scale: _TensorPlace) -> None:
        self.shape: tuple[int, int] = rows.shape
        self.format: QuantFormat = rows.format
        self._rows = rows
        self._packed = packed
        self._scale = scale

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[QuantBlock]:
        """As in `QuantRows`."""
        for block in self._rows.blocks(num_bytes, multiple):
            codes = block.codes if self.format.bits == 8 else block.codes[:, ::2] | (block.codes[:, 1::2] << 4)
            self._packed.write(codes)
            self._scale.write(block.scales)
            yield block


def _quantization_config(rounding: Rounding, dense: list[str], tables: list[str]) -> dict[str, Any]:
    """Return the section of config.json.

    dense: linears and tables that are not in few bits; tables: all that are in 8 bits if they are in few.
    """
    groups = {"group_0": _scheme(["Linear"], 8 if rounding == "int8" else 4), "group_1": _scheme(tables, 8)}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(dense),
    }


def _scheme(targets: list[str], bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}
