"""A model's tensors by name: each is read once, checked, converted and hashed. Base of all sources of weights."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.device.file_rows import FileRows
from executor_svc.device.stored_linear import QuantRows
from executor_svc.models.base import StoredWeight
from executor_svc.models.files.content_digest import ContentDigest
from executor_svc.models.folder import LoaderError
from executor_svc.models.specs.spec import HEAD, TABLE

_log = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 22
"""Of a tensor's rows that are converted at a time."""


@dataclass(frozen=True, slots=True)
class NamedWeight:
    """Implements `models.base.StoredWeight`: a tensor of a source, which is not read yet."""

    source: Weights
    name: str
    shape: tuple[int, ...]

    def blocks(self, rows: int) -> Iterator[Tensor]:
        return self.source.blocks(self.name, self.shape, rows)

    def whole(self) -> Tensor:
        return self.source.get(self.name, self.shape)

    def in_file(self) -> FileRows | None:
        """As in `device.file_rows.InFile`."""
        return self.source.rows_in_file(self.name, self.shape)


class Weights:
    """Tensors by name; each is read once, checked, converted and hashed. Base class of every source.

    Several threads may read at once, each another tensor.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._torch_device = device
        self.matrix_bytes = dtype.itemsize
        """Of a number of a dense matrix in memory."""
        self._hashes: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}
        self._not_finite: set[str] = set()
        self._left: set[str] = set()
        """Linears that another rank reads."""

    @property
    def num_parameters(self) -> int:
        """Elements of the tensors that have been read."""
        return sum(self._counts.values())

    def least_bytes(self, num_elements: int, prefix: str = "") -> int:
        """Return the least memory of a model whose linears and tables have so many elements.

        prefix: of the names, as they are stored, of its tensors. Sources of weights in few bits override it.
        """
        return num_elements * self.matrix_bytes

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise LoaderError for a wrong shape or name."""

    def _stored_blocks(self, name: str, shape: tuple[int, ...], rows: int) -> Iterator[Tensor]:
        """Yield a tensor as it is stored, `rows` rows at a time; a block is valid until the next one."""
        raise NotImplementedError

    def open(self, name: str, shape: tuple[int, ...]) -> NamedWeight:
        """Return a tensor to be read later; raises LoaderError for a wrong shape or name at once."""
        self._check(name, shape)
        return NamedWeight(self, name, shape)

    def rows_in_file(self, name: str, shape: tuple[int, ...]) -> FileRows | None:
        """Return where the rows of a dense tensor lie in a file as they are, or None."""
        return None

    def holds(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""
        return True

    def is_tied(self) -> bool:
        """Return whether the head is the table of embeddings: it is not stored, or as a copy of the same numbers.

        Asked where config.json says that the two are tied. It reads both as far as they are equal.
        """
        return True

    def share_ends(self) -> None:
        """Read the table of embeddings of a tied model from its head, where that is stored in its place."""

    def open_linear(self, prefix: str, shape: tuple[int, int]) -> StoredWeight | QuantRows:
        """As in `models.base.WeightSource`; sources of weights in few bits override it."""
        return self.open(f"{prefix}.weight", shape)

    def leave_linear(self, prefix: str, shape: tuple[int, int], biased: bool) -> None:
        """Count a linear that another rank reads; errors as those of `open_linear`."""
        self.open_linear(prefix, shape)
        self._counts[f"{prefix}.weight"] = math.prod(shape)
        if biased:
            self.open(f"{prefix}.bias", shape[:1])
            self._counts[f"{prefix}.bias"] = shape[0]
        self._left.add(prefix)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of a tensor in dtype, by default the model's; raises LoaderError for a wrong shape or name."""
        self._check(name, shape)
        tensor, first = torch.empty(shape, dtype=dtype or self._dtype), 0
        row_bytes = max(1, math.prod(shape[1:]) * tensor.itemsize)
        for block in self.blocks(name, shape, max(1, _BLOCK_BYTES // row_bytes), dtype):
            tensor[first : first + len(block)] = block
            first += len(block)
        return tensor.to(self._torch_device)

    def blocks(
        self, name: str, shape: tuple[int, ...], rows: int, dtype: torch.dtype | None = None
    ) -> Iterator[Tensor]:
        """Yield a tensor in dtype, by default the model's, on the CPU, `rows` rows at a time.

        A block is valid until the next one. The hash is of the very bytes that are yielded, whatever becomes of the
        file.
        """
        dtype = dtype or self._dtype
        content = ContentDigest(f"{name} {list(shape)} {dtype}")
        count = 0
        for stored in self._stored_blocks(name, shape, rows):
            block = stored.to(dtype)
            self._check_finite(name, block)
            content.update(block)
            count += block.numel()
            yield block
        self._hashes[name], self._counts[name] = content.digest(), count

    def _check_finite(self, name: str, block: Tensor) -> None:
        """Note a tensor that holds NaN or infinite numbers; `refuse_not_finite` raises."""
        if block.numel() and not all(math.isfinite(each) for each in block.aminmax()):
            self._not_finite.add(name)

    def refuse_not_finite(self, place: str) -> None:
        """Raise LoaderError if tensors that were read hold NaN or infinite numbers: all texts would be lost to them.

        Of embeddings that are no head, it logs them: only texts with such tokens are.
        """
        table = f"{TABLE}.weight"
        wrong = sorted(self._not_finite)
        if wrong == [table] and any(name.startswith(HEAD) for name in self._hashes):
            _log.warning("%s: tensor %s holds NaN or infinite numbers: texts with such tokens fail", place, table)
        elif wrong:
            raise LoaderError(
                f"{place}: {len(wrong)} tensors hold NaN or infinite numbers: {', '.join(wrong[:3])}: the checkpoint "
                "is damaged, or made for another dtype"
            )

    def get_scales(self, name: str, count: int) -> Tensor | None:
        """Return the scales of `count` heads, [count] float32 on the CPU, finite and above 0; None if there are none.

        A tensor of one number applies to all heads. Raises LoaderError for other shapes and numbers.
        """
        return None

    def digest(self) -> bytes:
        """Return a hash of names, shapes, dtype and bytes of all loaded tensors, independent of their order."""
        return hashlib.sha256(b"".join(self._hashes[name] for name in sorted(self._hashes))).digest()
