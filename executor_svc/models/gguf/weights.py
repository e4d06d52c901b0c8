"""A model's tensors from GGUF files, under the names of transformers' checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from cadenza_common.gguf.file import GgufFile, GgufTensor
from executor_svc.device.file_rows import FileRows
from executor_svc.device.stored_linear import QuantBlock, QuantFormat, QuantRows
from executor_svc.models.base import StoredWeight
from executor_svc.models.files.content_digest import ContentDigest
from executor_svc.models.files.named_weights import Weights
from executor_svc.models.folder import LoaderError
from executor_svc.models.gguf.block_types import BLOCK_TYPES, DENSE_TYPES
from executor_svc.models.gguf.tensor_names import TensorNames, halves
from executor_svc.models.parallel.part import Part
from executor_svc.models.parallel.part_of_file import PartOfFile
from executor_svc.models.parallel.part_tensors import Cut
from executor_svc.models.safetensors_file import StoredTensor, is_same_content
from executor_svc.models.specs.spec import HEAD, TABLE

_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_MAX_VECTOR = 1 << 16
_E8M0_NAN = 255


class GgufWeights(Weights):
    """Tensors of a model's GGUF files, read block by block; those in few bits stay so."""

    def __init__(self, file: GgufFile, names: TensorNames, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._file = file
        self._names = names
        self._matrices: dict[str, set[int]] = {}
        """What was read of tensors that hold the matrices of all experts."""
        self._numbers = _numbers(file) if names.architecture == "apertus" else {}
        """Tensors of one number that the file has as metadata."""

    def least_bytes(self, num_elements: int, prefix: str = "") -> int:
        """As in `Weights`: all tensors in few bits as codes and scales, dense ones in the model's dtype."""
        return sum(self._least_bytes_of(each) for name, each in self._file.tensors.items() if name.startswith(prefix))

    def _least_bytes_of(self, tensor: GgufTensor) -> int:
        kind, numbers = BLOCK_TYPES.get(tensor.type.name), math.prod(tensor.shape)
        if kind is None:
            return numbers * self.matrix_bytes if tensor.type.name in DENSE_TYPES else tensor.num_bytes
        return kind.format.num_bytes((numbers // tensor.shape[-1], tensor.shape[-1]))

    def holds(self, name: str) -> bool:
        """As in `Weights`."""
        return self._names.stored(name) in self._file.tensors

    def is_tied(self) -> bool:
        """As in `Weights`; tensors in few bits are compared as they are stored."""
        found = [self._file.tensors.get(self._names.stored(f"{module}.weight")) for module in (HEAD, TABLE)]
        head, table = found
        if head is None or table is None:
            return True
        if head.type.name in DENSE_TYPES and table.type.name in DENSE_TYPES:
            return is_same_content(_dense(head), _dense(table), self._dtype)
        return (head.shape, head.type) == (table.shape, table.type) and is_same_content(_bytes(head), _bytes(table))

    def rows_in_file(self, name: str, shape: tuple[int, ...]) -> FileRows | None:
        """As in `Weights`."""
        changed = name in self._numbers or self._names.head_rows(name) is not None or self._names.offset(name)
        return None if changed else _dense(self._tensor(name, shape)).in_file()

    def check_linears(self, shapes: Iterable[tuple[str, tuple[int, int]]]) -> None:
        """Raise LoaderError for a tensor of these names that is missing, has another shape, or cannot be read."""
        for name, shape in shapes:
            self._tensor(name, shape)

    def open_linear(self, prefix: str, shape: tuple[int, int]) -> StoredWeight | QuantRows:
        """As in `models.base.WeightSource`."""
        name = f"{prefix}.weight"
        tensor = self._tensor(name, shape)
        if tensor.type.name in DENSE_TYPES:
            return self.open(name, shape)
        return GgufRows(tensor, shape, self._names.head_rows(name), lambda digest: self._add(name, shape, digest))

    def open_part(self, name: str, shape: tuple[int, ...], part: Part) -> StoredWeight:
        """As in `parallel.source.PartSource`."""
        self._check(name, shape)
        return PartOfFile(self, name, shape, part, self._dtype, self._torch_device)

    def part_blocks(self, name: str, shape: tuple[int, ...], part: Part, rows: int) -> Iterator[Tensor]:
        """As `blocks`, for a part of a tensor, of which nothing else is read."""
        absent = self._is_absent_bias(name)
        stored, head_rows = None if absent else _dense(self._tensor(name, shape)), self._names.head_rows(name)
        content = ContentDigest(f"{name} {list(shape)} {part} {self._dtype}")
        if stored is None:
            blocks = iter(torch.zeros(part.count).split(rows))
        elif head_rows is None or part.of_columns:
            blocks = Cut(1 if part.of_columns else 0, part.ranges).blocks(stored, rows)
        else:
            heads = (_halves_of(stored.rows_alone(chosen), head_rows, rows) for chosen in part.ranges)
            blocks = chain.from_iterable(heads)
        for read in blocks:
            block = read.to(self._dtype)
            self._check_finite(name, block)
            content.update(block)
            yield block
        self._add(name, shape, content.digest())

    def open_linear_part(self, prefix: str, whole: QuantRows, expected: QuantRows, part: Part) -> QuantRows:
        """As in `parallel.source.PartSource`: columns must begin and end with the tensor's blocks of numbers."""
        assert isinstance(whole, GgufRows)
        return whole.part(part, expected.shape) or expected

    def check_all_used(self, ignored: Callable[[str], bool]) -> None:
        """Raise LoaderError if the files hold tensors that the model has not read: they are of another model.

        Raises GgufError if a file has changed since its header was read: tensors may be of both contents.
        """
        self._file.check_unchanged()
        used = {self._names.stored(name) for name in self._hashes}
        copy = self._names.stored(f"{HEAD}.weight") if ignored(f"{HEAD}.weight") else None  # of the table
        used |= self._matrices.keys()
        used -= {name for name, each in self._matrices.items() if len(each) != self._file.tensors[name].shape[0]}
        unused = sorted(name for name in self._file.tensors if name not in used)
        unused = [name for name in unused if not ignored(name) and not ignored(self._names.original(name))]
        unused = [name for name in unused if name not in (*_FACTORS, copy)]
        if unused:
            shown = ", ".join(unused[:3]) + (", …" if len(unused) > 3 else "")
            raise LoaderError(f"{self._file.paths[0]}: {len(unused)} tensors that the model does not use: {shown}")

    def _add(self, name: str, shape: tuple[int, ...], digest: bytes) -> None:
        """Count a tensor that has been read as it is stored."""
        self._hashes[name], self._counts[name] = digest, math.prod(shape)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        """Return a tensor of a type that can be read; raises LoaderError for a wrong shape, type or name."""
        stored, half = self._stored_name(name)
        tensor = self._file.tensors.get(stored)
        if tensor is None:
            raise LoaderError(f"{self._file.paths[0]}: tensor {stored} is missing")
        if (expert := self._names.expert(name)) is not None:
            tensor = self._matrix(tensor, expert)
        if half is not None:
            tensor = _half(tensor, half)
        if shape == (1, *tensor.shape):  # a linear of one row
            tensor = replace(tensor, shape=shape)
        if len(tensor.shape) == 3 and shape == (tensor.shape[0] * tensor.shape[1], tensor.shape[2]):  # of all heads
            tensor = replace(tensor, shape=shape)
        if tensor.type.name in DENSE_TYPES and _is_same_order(tensor.shape, shape):
            tensor = replace(tensor, shape=shape)
        if tensor.shape != shape:
            raise LoaderError(
                f"{tensor.path}: tensor {stored} has shape {list(tensor.shape)}, the metadata says {list(shape)}"
            )
        if tensor.type.name not in BLOCK_TYPES and tensor.type.name not in DENSE_TYPES:
            supported = ", ".join((*DENSE_TYPES, *BLOCK_TYPES))
            raise LoaderError(
                f"{tensor.path}: tensor {stored} is {tensor.type.name}, which is not supported; supported: {supported}"
            )
        return tensor

    def _stored_name(self, name: str) -> tuple[str, int | None]:
        """Return the name of the tensor in the file, and which half of its rows is meant; None: all."""
        stored = self._names.stored(name)
        fused = self._names.fused(stored) if stored not in self._file.tensors else None
        return fused if fused is not None and fused[0] in self._file.tensors else (stored, None)

    def _matrix(self, tensor: GgufTensor, index: int) -> GgufTensor:
        """Return one expert's matrix of the tensor of all."""
        if len(tensor.shape) not in (2, 3) or index >= tensor.shape[0]:
            raise LoaderError(f"{tensor.path}: tensor {tensor.name} of shape {list(tensor.shape)} has no part {index}")
        self._matrices.setdefault(tensor.name, set()).add(index)
        each, size = tensor.num_bytes // tensor.shape[0], tensor.shape[1:]
        name = f"{tensor.name}[{index}]"
        return replace(tensor, name=name, shape=size, offset=tensor.offset + index * each)

    def _is_absent_bias(self, name: str) -> bool:
        """Return whether a bias is not in the file: it is 0, as in llama.cpp."""
        return name.endswith(".bias") and self._stored_name(name)[0] not in self._file.tensors

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if self._is_absent_bias(name) or name in self._numbers:
            return
        tensor = self._tensor(name, shape)
        if tensor.type.name not in DENSE_TYPES:
            raise LoaderError(
                f"{tensor.path}: tensor {tensor.name} is {tensor.type.name}; norms and biases must be one of "
                f"{', '.join(DENSE_TYPES)}"
            )

    def _stored_blocks(self, name: str, shape: tuple[int, ...], rows: int) -> Iterator[Tensor]:
        if self._is_absent_bias(name):
            yield from torch.zeros(shape).split(rows)
            return
        if name in self._numbers:
            yield torch.tensor([self._numbers[name]])
            return
        stored, head_rows = _dense(self._tensor(name, shape)), self._names.head_rows(name)
        if head_rows is not None:
            yield from _halves_of(stored, head_rows, rows)
            return
        offset = self._names.offset(name)
        for block in stored.blocks(rows):
            yield block.float() - offset if offset else block


class GgufRows:
    """Implements `device.stored_linear.QuantRows`: a tensor in few bits."""

    column_order: Tensor | None = None
    whole_row_activations: bool = False

    def __init__(
        self,
        tensor: GgufTensor,
        shape: tuple[int, int],
        head_rows: int | None,
        on_read: Callable[[bytes], None],
    ) -> None:
        """head_rows: as of `TensorNames.head_rows`; on_read: called with the sha256 of name, shape, type and bytes."""
        self.shape: tuple[int, int] = shape
        self.format: QuantFormat = BLOCK_TYPES[tensor.type.name].format
        self._tensor = tensor
        self._head_rows = head_rows
        self._on_read = on_read
        self._cut = Cut()

    @property
    def num_bytes(self) -> int:
        """Of the tensor in its file."""
        return self._tensor.num_bytes

    def in_file(self) -> FileRows | None:
        """As in `device.file_rows.InFile`."""
        if self._head_rows is not None or self._cut.ranges:
            return None
        tensor = self._tensor
        return FileRows(tensor.path, tensor.offset, tensor.num_bytes, tensor.type.name)

    def part(self, part: Part, shape: tuple[int, int]) -> GgufRows | None:
        """Return some rows or columns, of this shape, of which nothing else is read; None if that is not possible."""
        if part.of_columns:
            each, size = self._tensor.type.block_columns, self._tensor.type.block_bytes
        else:
            each = size = self._head_rows or 1
        if any(chosen.start % each or chosen.stop % each for chosen in part.ranges):
            return None
        ranges = (range(chosen.start // each * size, chosen.stop // each * size) for chosen in part.ranges)
        found = GgufRows(self._tensor, shape, self._head_rows, self._on_read)
        found._cut = Cut(1 if part.of_columns else 0, tuple(ranges))
        return found

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[QuantBlock]:
        """As in `QuantRows`; raises LoaderError for scales that are not finite."""
        tensor, cut = self._tensor, self._cut
        kind, size = BLOCK_TYPES[tensor.type.name], tensor.type.block_bytes
        unit = multiple if self._head_rows is None else math.lcm(multiple, self._head_rows)
        rows = unit * max(1, num_bytes // (unit * self.shape[1]))
        stored = _bytes(tensor)
        content = ContentDigest(
            f"{tensor.name} {list(tensor.shape)} {tensor.type.name}{f' {cut}' if cut.ranges else ''}"
        )
        for block in cut.blocks(stored, rows):
            content.update(block)
            ordered = block if self._head_rows is None else halves(block, self._head_rows)
            unpacked = kind.unpack(ordered.unflatten(1, (-1, size)))
            if not _is_finite(unpacked, kind.format):
                raise LoaderError(f"{tensor.path}: tensor {tensor.name} has scales that are NaN or infinite")
            yield unpacked
        self._on_read(content.digest())


def _numbers(file: GgufFile) -> dict[str, float]:
    """Return the scalars of xIELU of each layer by their names in transformers' checkpoints; raises GgufError."""
    metadata, found = file.metadata, dict[str, float]()
    for kind in ("alpha_p", "alpha_n", "beta", "eps"):
        key, count = f"xielu.{kind}", metadata.integer("apertus.block_count")
        one_for_all = not isinstance(metadata.get(key), list)
        numbers = [metadata.number(key)] * min(count, _MAX_VECTOR) if one_for_all else metadata.numbers(key)
        if len(numbers) != count:
            raise metadata.error(key, f"must have one number for each of {count} layers, not {len(numbers)}")
        found |= {f"model.layers.{layer}.mlp.act_fn.{kind}": number for layer, number in enumerate(numbers)}
    return found


def _is_finite(block: QuantBlock, kind: QuantFormat) -> bool:
    if kind.scale == "e8m0":
        return not bool((block.scales == _E8M0_NAN).any())
    numbers = (block.scales, block.super_scales, block.minimums, block.super_minimums)
    return all(bool(each.isfinite().all()) for each in numbers if each is not None and each.is_floating_point())


def read_vector(file: GgufFile, name: str) -> list[float] | None:
    """Return the numbers of a small tensor of one dimension, such as rotary factors; None if the file has none.

    Raises LoaderError for another shape or type.
    """
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if len(tensor.shape) != 1 or tensor.shape[0] > _MAX_VECTOR or tensor.type.name not in DENSE_TYPES:
        raise LoaderError(
            f"{tensor.path}: tensor {name} is {tensor.type.name} of shape {list(tensor.shape)}; it must be one row of "
            f"{', '.join(DENSE_TYPES)}"
        )
    numbers: list[float] = _dense(tensor).whole().float().tolist()
    return numbers


def _is_same_order(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether two shapes differ by dimensions of 1 alone, or the second is a row of what lies by group."""
    if [each for each in stored if each != 1] == [each for each in shape if each != 1]:
        return True
    return len(stored) == 2 and len(shape) == 1 and math.prod(stored) == shape[0]


def _half(tensor: GgufTensor, index: int) -> GgufTensor:
    """Return half of a tensor's rows: the first or the second."""
    rows = tensor.shape[0] // 2
    start = index * rows * (tensor.num_bytes // max(1, tensor.shape[0]))
    return replace(tensor, shape=(rows, *tensor.shape[1:]), offset=tensor.offset + start)


def _dense(tensor: GgufTensor) -> StoredTensor:
    """Return a dense tensor as its bytes lie: safetensors calls the types the same."""
    return StoredTensor(tensor.path, tensor.name, tensor.type.name, tensor.shape, tensor.offset)


def _bytes(tensor: GgufTensor) -> StoredTensor:
    """Return a matrix in few bits as the bytes of its rows."""
    rows, columns = tensor.shape
    row_bytes = columns // tensor.type.block_columns * tensor.type.block_bytes
    return StoredTensor(tensor.path, tensor.name, "U8", (rows, row_bytes), tensor.offset)


def _halves_of(stored: StoredTensor, head_rows: int, rows: int) -> Iterator[Tensor]:
    """Yield a tensor in transformers' order, `rows` rows at a time; whole heads are read for them."""
    count, dtype = stored.shape[0], stored.dtype
    assert dtype is not None
    row_bytes = math.prod(stored.shape[1:]) * dtype.itemsize
    for start in range(0, count, rows):
        end = min(start + rows, count)
        first, last = start // head_rows * head_rows, -(-end // head_rows) * head_rows
        shape = (last - first, *stored.shape[1:])
        heads = StoredTensor(stored.path, stored.name, stored.stored_as, shape, stored.offset + first * row_bytes)
        yield halves(heads.whole(), head_rows)[start - first : end - first]
