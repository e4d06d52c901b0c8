"""A model's tensors, from the safetensors files of its folder."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from executor_svc.device.file_rows import FileRows
from executor_svc.device.stored_linear import QuantRows
from executor_svc.models.base import StoredWeight
from executor_svc.models.files.content_digest import ContentDigest
from executor_svc.models.files.named_weights import Weights
from executor_svc.models.files.stored_names import decoder_names, give_own_endings, has_own_names
from executor_svc.models.files.stored_order import FileOrder
from executor_svc.models.folder import LoaderError, find_weights
from executor_svc.models.parallel.part import Part
from executor_svc.models.parallel.part_of_file import PartOfFile
from executor_svc.models.parallel.part_tensors import Cut, PartTensors, is_same_format
from executor_svc.models.quantized.method import Quantization
from executor_svc.models.quantized.rows import LazyRows
from executor_svc.models.safetensors_file import (
    StoredTensor,
    TensorRows,
    is_same_content,
    is_without_effect,
    tensors_of,
)
from executor_svc.models.specs.spec import HEAD, TABLE, DecoderSpec

_log = logging.getLogger(__name__)


class SafetensorsWeights(Weights):
    """Tensors of a folder's safetensors files, single or sharded, read block by block."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
        spec: DecoderSpec | None = None,
    ) -> None:
        """quantization: of the linears that the files hold in few bits.

        spec: of a decoder, whose tensors have Cadenza's names and order, whatever they are in the files.
        """
        super().__init__(dtype, device)
        self._folder = folder
        self._quantization = quantization
        self._skipped: set[str] = set()
        self._matrices: dict[str, set[int]] = {}
        """What was read of tensors that hold the matrices of all experts."""
        self._headers: dict[Path, dict[str, StoredTensor]] = {}
        files = self._tensor_files()
        names = dict(zip(files, files, strict=True))
        self._order: FileOrder | None = None
        self._shown: Callable[[str], str] = str
        """Names a tensor in messages, as transformers does in files of this kind."""
        if spec is not None:
            names = decoder_names(files, spec.names.first, spec.files)
            if not has_own_names(files, spec.names.first):
                self._order, self._shown = FileOrder(spec), spec.files.stored_name
        self._places = {name: (files[stored], stored) for name, stored in names.items()}
        """File and stored name of each tensor."""
        if spec is not None:
            give_own_endings(self._places, spec.names.renamed, folder)

    def _tensor_files(self) -> dict[str, Path]:
        """Return the file of each tensor; of a sharded checkpoint also of those that its index forgets."""
        found = find_weights(self._folder)
        if not isinstance(found, dict):
            return dict.fromkeys(self._header(found), found)
        return {name: path for path in dict.fromkeys(found.values()) for name in self._header(path)} | found

    def _header(self, path: Path) -> dict[str, StoredTensor]:
        if path not in self._headers:
            self._headers[path] = tensors_of(path)
        return self._headers[path]

    def _stored(self, name: str) -> StoredTensor:
        """Return a tensor that the folder's index names; raises LoaderError if its file lacks it."""
        whole, index = self._expert_of(name)
        path, stored_name = self._places[whole]
        stored = self._header(path).get(stored_name)
        if stored is None:
            raise LoaderError(f"{path}: tensor {stored_name} cannot be read: the file does not hold it")
        if index is None:
            return stored
        self._matrices.setdefault(whole, set()).add(index)
        return stored.matrix(index)

    def _expert_of(self, name: str) -> tuple[str, int | None]:
        """Return the tensor that holds `name`, and its place there: some checkpoints have one for all experts."""
        found = None if name in self._places else re.fullmatch(r"(.+)\.(\d+)((?:\.\w+)?)\.weight", name)
        for whole in () if found is None else (f"{found[1]}{found[3]}.weight", f"{found[1]}{found[3]}"):
            if whole in self._places:
                assert found is not None
                return whole, int(found[2])
        return name, None

    def holds(self, name: str) -> bool:
        """As in `Weights`."""
        return self._expert_of(name)[0] in self._places

    def rows_in_file(self, name: str, shape: tuple[int, ...]) -> FileRows | None:
        """As in `Weights`."""
        stored = self._ordered(name)
        return stored.in_file() if isinstance(stored, StoredTensor) and stored.shape == shape else None

    def is_tied(self) -> bool:
        """As in `Weights`; in few bits, all of their tensors are compared as they are stored."""
        head, table = self._parts(HEAD), self._parts(TABLE)
        if not head or not table:
            return True
        return head.keys() == table.keys() and all(
            is_same_content(head[kind], table[kind], self._dtype if head.keys() == {"weight"} else None)
            for kind in head
        )

    def share_ends(self) -> None:
        """As in `Weights`."""
        if not self._parts(TABLE):
            names = {f"{TABLE}.{kind}": f"{HEAD}.{kind}" for kind in self._parts(HEAD)}
            self._places |= {table: self._places[head] for table, head in names.items()}
            self._skipped |= set(names.values())

    def _parts(self, module: str) -> dict[str, StoredTensor]:
        """Return the tensors of a module by the last part of their names, its bias left out."""
        names = (name for name in self._places if name.startswith(f"{module}."))
        parts = {name.removeprefix(f"{module}."): self._stored(name) for name in names}
        return {kind: stored for kind, stored in parts.items() if kind != "bias"}

    def least_bytes(self, num_elements: int, prefix: str = "") -> int:
        """As in `Weights`; of linears in few bits: all tensors as they are stored, dense ones in the model's dtype."""
        if self._quantization is None:
            return super().least_bytes(num_elements, prefix)
        return sum(self._held_bytes(self._stored(name)) for name in self._places if name.startswith(prefix))

    def _held_bytes(self, stored: StoredTensor) -> int:
        dtype = stored.dtype or torch.uint8
        is_dense = dtype.is_floating_point and dtype.itemsize >= 2 and stored.name.endswith(".weight")
        return math.prod(stored.shape) * (self.matrix_bytes if is_dense else dtype.itemsize)

    def open_linear(self, prefix: str, shape: tuple[int, int]) -> StoredWeight | QuantRows:
        """As in `models.base.WeightSource`."""
        rows = None if self._quantization is None else self._quantization.open(self, prefix, shape)
        if rows is None:
            return self.open(f"{prefix}.weight", shape)
        # The same bytes in another format are another model.
        description = f"{prefix} {list(shape)} {rows.format} {rows.whole_row_activations} {self._quantization}"
        self._hashes[f"{prefix} format"] = hashlib.sha256(description.encode()).digest()
        return rows if self._order is None else self._order.of_rows(prefix, rows)

    def open_part(self, name: str, shape: tuple[int, ...], part: Part) -> StoredWeight:
        """Return some rows or columns of a tensor of this shape, of which nothing else is read; as `open`."""
        self._check(name, shape)
        return PartOfFile(self, name, shape, part, self._dtype, self._torch_device)

    def part_blocks(self, name: str, shape: tuple[int, ...], part: Part, rows: int) -> Iterator[Tensor]:
        """As `blocks`, for a part of a tensor; the hash is of what is read."""
        stored = self._stored(name)
        content = ContentDigest(f"{name} {list(stored.shape)} {part} {self._dtype}")
        for read in Cut(1 if part.of_columns else 0, part.ranges).blocks(self._ordered(name), rows):
            block = read.to(self._dtype)
            self._check_finite(name, block)
            content.update(block)
            yield block
        self._hashes[name], self._counts[name] = content.digest(), math.prod(stored.shape)

    def open_linear_part(self, prefix: str, whole: QuantRows, expected: QuantRows, part: Part) -> QuantRows:
        """Return some rows or columns of a linear in few bits, of which nothing else is read where that is possible.

        whole: from `open_linear`; expected: the part as it is cut in memory, after all is read.
        """
        assert self._quantization is not None
        if not isinstance(whole, LazyRows):
            return expected
        tensors = PartTensors(self, prefix, whole, part)
        if not tensors.is_possible():
            return expected
        try:
            found = self._quantization.open(tensors, prefix, expected.shape)
        except LoaderError as error:  # such as a group of all columns, in numbers
            _log.info("%s is read whole by each rank: %s", prefix, error)
            return expected
        return expected if found is None or not is_same_format(found, expected) else found

    def cut_blocks(self, name: str, cut: Cut, rows: int, elements: int) -> Iterator[Tensor]:
        """As in `parallel.part_tensors.CutReader`."""
        stored = self.require(name)
        content = _raw_content(name, stored, f" {cut}" if cut.ranges else "")
        for block in cut.blocks(stored, rows):
            content.update(block)
            yield block
        self._hashes[name], self._counts[name] = content.digest(), elements

    def find(self, name: str) -> StoredTensor | None:
        """As in `quantized.tensors.CheckpointTensors`, like the following methods."""
        return self._stored(name) if name in self._places else None

    def require(self, name: str) -> StoredTensor:
        if self._expert_of(name)[0] not in self._places:
            raise LoaderError(f"model folder {self._folder}: tensor {self._shown(name)} is missing")
        return self._stored(name)

    def raw_blocks(self, name: str, rows: int, elements: int = 0) -> Iterator[Tensor]:
        stored = self.require(name)
        content = _raw_content(name, stored)
        for block in stored.blocks(rows):
            content.update(block)
            yield block
        self._hashes[name], self._counts[name] = content.digest(), elements

    def raw(self, name: str, elements: int = 0) -> Tensor:
        stored = self.require(name)
        whole, content = stored.whole(), _raw_content(name, stored)
        content.update(whole)
        self._hashes[name], self._counts[name] = content.digest(), elements
        return whole

    def skip(self, name: str) -> None:
        self._skipped.add(name)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self.require(name)
        found = self._ordered(name).shape
        if (found or (1,)) != shape:
            raise LoaderError(
                f"{stored.path}: tensor {self._shown(name)} has shape {list(found)}, config.json says {list(shape)}"
            )
        if stored.dtype is None or not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
            raise LoaderError(
                f"{stored.path}: tensor {name} is {stored.stored_as}, and config.json has no quantization_config for it"
            )

    def _stored_blocks(self, name: str, shape: tuple[int, ...], rows: int) -> Iterator[Tensor]:
        stored = self._stored(name)
        return self._ordered(name).blocks(rows) if stored.shape else iter([stored.whole()[None]])

    def _ordered(self, name: str) -> TensorRows:
        stored = self._stored(name)
        return stored if self._order is None else self._order.of(name, stored)

    def get_scales(self, name: str, count: int) -> Tensor | None:
        """As in `Weights`; scales are never rounded to the model's dtype."""
        if name not in self._places:
            return None
        stored = self._stored(name)
        if math.prod(stored.shape) != 1 and stored.shape not in ((count,), (count, 1, 1)):
            raise LoaderError(
                f"{stored.path}: tensor {name} has shape {list(stored.shape)}; scales are one number, or one for each "
                f"of {count} KV heads"
            )
        scales = stored.whole().to(torch.float32).flatten()
        if not bool(((scales > 0) & scales.isfinite()).all()):
            raise LoaderError(f"{stored.path}: tensor {name} is {scales.tolist()}; scales must be finite and above 0")
        content = ContentDigest(f"{name} {list(scales.shape)} {scales.dtype}")
        content.update(scales)
        self._hashes[name] = content.digest()
        return scales.expand(count).contiguous()

    def check_all_used(self, ignored: Callable[[str], bool]) -> None:
        """Raise LoaderError if the files hold tensors that the model has not read: they are of another model.

        Those that change nothing may be there: empty ones, and biases that are 0.
        """
        known = self._hashes.keys() | self._skipped
        for name, used in self._matrices.items():
            path, stored_name = self._places[name]
            if len(used) == self._header(path)[stored_name].shape[0]:
                known |= {name}
        left = {
            name: place
            for name, place in self._places.items()
            if name not in known and name.rpartition(".")[0] not in self._left and not ignored(name)
        }
        stored = {name: self._header(path).get(name) for path, name in left.values()}
        unused = sorted(name for name, tensor in stored.items() if tensor is None or not is_without_effect(tensor))
        if unused:
            shown = ", ".join(unused[:3]) + (", …" if len(unused) > 3 else "")
            raise LoaderError(
                f"model folder {self._folder}: {len(unused)} tensors that the model does not use: {shown}"
            )


def _raw_content(name: str, stored: StoredTensor, part: str = "") -> ContentDigest:
    return ContentDigest(f"{name} {list(stored.shape)} {stored.stored_as}{part}")
