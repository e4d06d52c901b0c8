"""The tensors of gpt-oss, which has those of all experts in one, under the names that other mixtures have.

Dense they are transposed, [E, in, out], in MXFP4 they are not; gate and up are neighbouring rows of the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from executor_svc.device.file_rows import FileRows
from executor_svc.device.stored_linear import QuantBlock, QuantFormat, QuantRows
from executor_svc.models.base import StoredWeight
from executor_svc.models.checkpoint import SafetensorsWeights
from executor_svc.models.content_digest import ContentDigest
from executor_svc.models.folder import LoaderError
from executor_svc.models.quantized.rows import LazyRows, row_ranges, unpack_bytes
from executor_svc.models.quantized.tensors import check_scales
from executor_svc.models.safetensors_file import StoredTensor

_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_GROUP = 32
_KIND = QuantFormat(name="MXFP4", bits=4, group=_GROUP, values="e2m1", scale="e8m0")


class GptOssWeights(SafetensorsWeights):
    """As `SafetensorsWeights`: of each expert gate_proj, up_proj and down_proj, with biases."""

    def open_linear(self, prefix: str, shape: tuple[int, int]) -> StoredWeight | QuantRows:
        """As in `models.base.WeightSource`."""
        found = _EXPERT.fullmatch(f"{prefix}.weight")
        if found is None or f"{_fused(found)}_blocks" not in self._places:
            return super().open_linear(prefix, shape)
        rows, columns = shape
        place = _Place(found)
        if columns % _GROUP:
            raise LoaderError(f"{prefix}: {columns} columns are no whole groups of {_GROUP}")
        codes = self._matrix(place, "_blocks", (rows * place.step, columns // _GROUP, _GROUP // 2), torch.uint8)
        scales = self._matrix(place, "_scales", (rows * place.step, columns // _GROUP), torch.uint8)
        description = f"{prefix} {list(shape)} {_KIND}"

        def read(count: int) -> Iterator[QuantBlock]:
            content = ContentDigest(description)
            for part in row_ranges(rows, count):
                stored = range(part.start * place.step, part.stop * place.step)
                packed, exponents = (
                    each.rows_alone(stored).whole()[place.first :: place.step].contiguous() for each in (codes, scales)
                )
                check_scales(f"{place.fused}_scales", exponents)
                for each in (packed, exponents):
                    content.update(each)
                yield QuantBlock(unpack_bytes(packed.flatten(1), 4), exponents)
            self._hashes[f"{prefix}.weight"], self._counts[f"{prefix}.weight"] = content.digest(), rows * columns

        in_file = replace(place.rows(codes), stored_as="MXFP4 with scales apart", scales=place.rows(scales))
        return LazyRows(shape, _KIND, read, file=in_file)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        found = _EXPERT.fullmatch(name)
        if found is None:
            super()._check(name, shape)
        else:
            self._dense(_Place(found), shape)

    def _stored_blocks(self, name: str, shape: tuple[int, ...], rows: int) -> Iterator[Tensor]:
        found = _EXPERT.fullmatch(name)
        if found is None:
            yield from super()._stored_blocks(name, shape, rows)
            return
        place = _Place(found)
        whole = self._dense(place, shape).whole()
        own = (whole.t() if len(shape) == 2 else whole)[place.first :: place.step]
        for part in row_ranges(len(own), rows):
            yield own[part].contiguous()

    def rows_in_file(self, name: str, shape: tuple[int, ...]) -> FileRows | None:
        """As in `Weights`: rows of experts are columns of the file."""
        return super().rows_in_file(name, shape) if _EXPERT.fullmatch(name) is None else None

    def _dense(self, place: _Place, shape: tuple[int, ...]) -> StoredTensor:
        """Return an expert's matrix, transposed, or its bias, with the rows of gate and of up."""
        rows = shape[0] * place.step
        stored = (shape[1], rows) if len(shape) == 2 else (rows,)
        return self._matrix(place, "" if place.kind == "weight" else "_bias", stored, None)

    def _matrix(self, place: _Place, ending: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> StoredTensor:
        """Return an expert's part, of this shape, of the tensor of all; dtype None: floats of two bytes or four."""
        name = place.fused + ending
        stored = self.require(name)
        if stored.shape[1:] != shape or place.expert >= stored.shape[0]:
            raise LoaderError(
                f"{stored.path}: tensor {name} has shape {list(stored.shape)}, config.json says one of {list(shape)} "
                f"for each expert"
            )
        floats = stored.dtype is not None and stored.dtype.is_floating_point and stored.dtype.itemsize >= 2
        if stored.dtype != dtype if dtype is not None else not floats:
            raise LoaderError(f"{stored.path}: tensor {name} is {stored.stored_as}, which it cannot be")
        self._matrices.setdefault(name, set()).add(place.expert)
        alone = stored.rows_alone(range(place.expert, place.expert + 1))
        return replace(alone, name=f"{name}[{place.expert}]", shape=shape)


class _Place:
    """Where a tensor of an expert is."""

    def __init__(self, found: re.Match[str]) -> None:
        self.fused, self.expert, self.kind = _fused(found), int(found[2]), found[4]
        self.step = 1 if found[3] == "down" else 2
        self.first = 1 if found[3] == "up" else 0
        """Of its rows, and from one to the next."""

    def rows(self, stored: StoredTensor) -> FileRows:
        """Return where its rows of an expert's matrix are."""
        whole = stored.in_file()
        row_bytes = whole.num_bytes // stored.shape[0]
        start, stride = self.first * row_bytes, self.step * row_bytes
        num_bytes = whole.num_bytes - (self.step - 1) * row_bytes
        return FileRows(whole.path, whole.offset + start, num_bytes, whole.stored_as, stride)


def _fused(found: re.Match[str]) -> str:
    return f"{found[1]}.{'down' if found[3] == 'down' else 'gate_up'}_proj"
