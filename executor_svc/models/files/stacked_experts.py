"""Checkpoints that have the matrices of all experts of a layer in one tensor, under the names of single ones.

Each form (`file_form.StackedForm`) is read as what it is: transposed (gpt-oss, Llama 4) or not (Qwen3.5, Gemma 4,
Granite), with rows of gate and up in turns (gpt-oss) or one after the other; dense, or in gpt-oss's blocks of MXFP4,
which are not transposed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from executor_svc.device.file_rows import FileRows
from executor_svc.device.stored_linear import QuantBlock, QuantFormat, QuantRows
from executor_svc.models.base import StoredWeight
from executor_svc.models.files.checkpoint import SafetensorsWeights
from executor_svc.models.files.content_digest import ContentDigest
from executor_svc.models.files.stored_names import give_own_endings
from executor_svc.models.folder import LoaderError
from executor_svc.models.quantized.method import Quantization
from executor_svc.models.quantized.rows import LazyRows, row_ranges, unpack_bytes
from executor_svc.models.quantized.tensors import check_scales
from executor_svc.models.safetensors_file import StoredTensor
from executor_svc.models.specs.file_form import LAYERS
from executor_svc.models.specs.spec import DecoderSpec, ExpertsSpec

_GROUP = 32
_KIND = QuantFormat(name="MXFP4", bits=4, group=_GROUP, values="e2m1", scale="e8m0")
_NUMBER = "{}"
_LAYERS = "|".join(map(re.escape, (LAYERS, "mtp.layers")))
"""The decoder's, and those of a head of multi-token prediction."""


class StackedExpertWeights(SafetensorsWeights):
    """As `SafetensorsWeights`; of each expert gate, up and down, whether files have them by expert or all in one."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None,
        spec: DecoderSpec,
    ) -> None:
        super().__init__(folder, dtype, device, quantization, spec)
        kinds = {layer.experts.names: layer.experts for layer in spec.layers if layer.experts is not None}
        self._stacks = [_Stack(experts) for experts in kinds.values()]
        for names in kinds:
            give_own_endings(self._places, names.renamed, folder)

    def open_linear(self, prefix: str, shape: tuple[int, int]) -> StoredWeight | QuantRows:
        """As in `models.base.WeightSource`."""
        name = f"{prefix}.weight"
        place = self._place(name)
        if place is None:
            return super().open_linear(prefix, shape)
        if f"{place.stack}_blocks" not in self._places:
            return self.open(name, shape)
        rows, columns = shape
        if columns % _GROUP:
            raise LoaderError(f"{prefix}: {columns} columns are no whole groups of {_GROUP}")
        sizes = rows * place.parts, columns // _GROUP
        codes = self._matrix(place, "_blocks", (*sizes, _GROUP // 2), torch.uint8)
        scales = self._matrix(place, "_scales", sizes, torch.uint8)
        description = f"{prefix} {list(shape)} {_KIND}"

        def read(count: int) -> Iterator[QuantBlock]:
            content = ContentDigest(description)
            for own in row_ranges(rows, count):
                packed, exponents = (place.own_rows(each, own, rows) for each in (codes, scales))
                check_scales(f"{place.stack}_scales", exponents)
                for each in (packed, exponents):
                    content.update(each)
                yield QuantBlock(unpack_bytes(packed.flatten(1), 4), exponents)
            self._hashes[name], self._counts[name] = content.digest(), rows * columns

        in_file = place.rows_in_file(codes, rows)
        apart = replace(in_file, stored_as="MXFP4 with scales apart", scales=place.rows_in_file(scales, rows))
        return LazyRows(shape, _KIND, read, file=apart)

    def rows_in_file(self, name: str, shape: tuple[int, ...]) -> FileRows | None:
        """As in `Weights`: rows of a transposed matrix are columns of the file."""
        place = self._place(name)
        if place is None:
            return super().rows_in_file(name, shape)
        return None if place.transposed else place.rows_in_file(self._dense(place, shape), shape[0])

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        place = self._place(name)
        if place is None:
            super()._check(name, shape)
        else:
            self._dense(place, shape)

    def _stored_blocks(self, name: str, shape: tuple[int, ...], rows: int) -> Iterator[Tensor]:
        place = self._place(name)
        if place is None:
            yield from super()._stored_blocks(name, shape, rows)
            return
        stored = self._dense(place, shape)
        if not place.transposed:
            for own in row_ranges(shape[0], rows):
                yield place.own_rows(stored, own, shape[0])
            return
        whole = stored.whole().t()[place.slice_of(slice(0, shape[0]), shape[0])]
        for own in row_ranges(shape[0], rows):
            yield whole[own].contiguous()

    def _place(self, name: str) -> _Place | None:
        """Return where a tensor of an expert is; None: by itself, or it is of no expert."""
        if name in self._places:
            return None
        found = next((place for stack in self._stacks if (place := stack.place(name)) is not None), None)
        if found is None:
            return None
        for ending in ("_bias",) if found.is_bias else ("", ".weight", "_blocks"):
            if found.stack + ending in self._places:
                return found if ending == "_blocks" else replace(found, ending=ending)
        return None

    def _dense(self, place: _Place, shape: tuple[int, ...]) -> StoredTensor:
        """Return an expert's matrix with the rows of gate and of up, as it is stored, or its bias."""
        rows = shape[0] * place.parts
        return self._matrix(place, place.ending, (*shape[1:], rows) if place.transposed else (rows, *shape[1:]), None)

    def _matrix(self, place: _Place, ending: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> StoredTensor:
        """Return an expert's part, of this shape, of the tensor of all; dtype None: floats of two bytes or four."""
        name = place.stack + ending
        stored, own = self.require(name), self._places[name][1]
        if stored.shape != (place.count, *shape):
            raise LoaderError(
                f"{stored.path}: tensor {own} has shape {list(stored.shape)}, config.json says "
                f"{[place.count, *shape]} for all experts of a layer"
            )
        floats = stored.dtype is not None and stored.dtype.is_floating_point and stored.dtype.itemsize >= 2
        if stored.dtype != dtype if dtype is not None else not floats:
            raise LoaderError(f"{stored.path}: tensor {own} is {stored.stored_as}, which it cannot be")
        self._matrices.setdefault(name, set()).add(place.expert)
        alone = stored.rows_alone(range(place.expert, place.expert + 1))
        return replace(alone, name=f"{name}[{place.expert}]", shape=shape)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor of an expert is."""

    stack: str
    """The name of the tensor of all experts, without its ending."""
    expert: int
    count: int
    """Of experts."""
    is_bias: bool
    parts: int
    """2 of gate and up, which are in one matrix."""
    part: int
    interleaved: bool
    turned: bool
    ending: str = ""

    @property
    def transposed(self) -> bool:
        """Whether the matrix has columns for rows."""
        return self.turned and not self.is_bias

    def slice_of(self, own: slice, rows: int) -> slice:
        """Return where rows of the part are in the matrix, which has `rows` of it."""
        if self.interleaved and self.parts > 1:
            return slice(own.start * self.parts + self.part, own.stop * self.parts, self.parts)
        return slice(self.part * rows + own.start, self.part * rows + own.stop)

    def rows_in_file(self, stored: StoredTensor, rows: int) -> FileRows:
        """Return where rows of the part are in the file."""
        whole, where = stored.in_file(), self.slice_of(slice(0, rows), rows)
        row_bytes, step = whole.num_bytes // stored.shape[0], where.step or 1
        num_bytes = ((rows - 1) * step + 1) * row_bytes
        stride = step * row_bytes if step > 1 else 0
        return FileRows(whole.path, whole.offset + where.start * row_bytes, num_bytes, whole.stored_as, stride)

    def own_rows(self, stored: StoredTensor, own: slice, rows: int) -> Tensor:
        """Read rows of the part, in memory of their own."""
        where = self.slice_of(own, rows)
        start = where.start - where.start % (where.step or 1)
        read = stored.rows_alone(range(start, where.stop)).whole()
        return read[where.start - start :: where.step].contiguous() if where.step else read


class _Stack:
    """The names of single matrices of experts, and what is known of the tensors that have them all."""

    def __init__(self, experts: ExpertsSpec) -> None:
        names = experts.names
        modules = (*names.into, names.down)
        pattern = "|".join(re.escape(each).replace(re.escape(_NUMBER), r"\d+") for each in modules)
        self._pattern = re.compile(rf"((?:{_LAYERS})\.\d+\.)({pattern})\.(weight|bias)")
        self._count, self._form = experts.router.num_experts, names.stacked
        self._numbered = {each.partition(_NUMBER)[2]: index for index, each in enumerate(names.into)}
        self._num_into = len(names.into)

    def place(self, name: str) -> _Place | None:
        """Return where a tensor of this name would be; None: it is of no expert."""
        found = self._pattern.fullmatch(name)
        if found is None:
            return None
        before, number, module = re.split(r"\.(\d+)(?=\.\w+$)", found[2])
        part = self._numbered.get(module)
        parts = 1 if part is None else self._num_into
        kind = "down" if part is None else "gate_up"
        return _Place(
            f"{found[1]}{before}.{kind}_proj",
            int(number),
            self._count,
            found[3] == "bias",
            parts,
            part or 0,
            self._form.interleaved,
            self._form.transposed,
        )
