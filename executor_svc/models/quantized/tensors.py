"""The tensors of a checkpoint as readers of weights in few bits use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from executor_svc.device.stored_linear import ScaleType
from executor_svc.models.folder import LoaderError
from executor_svc.models.safetensors_file import StoredTensor

SCALE_TYPES: dict[torch.dtype, ScaleType] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}

_E8M0_NAN = 255


class CheckpointTensors(Protocol):
    """Tensors by name, as their files store them; each is read once."""

    def find(self, name: str) -> StoredTensor | None:
        """Return a tensor, None if there is none of this name; raises LoaderError for an unreadable file."""
        ...

    def require(self, name: str) -> StoredTensor:
        """Return a tensor; raises LoaderError if it is missing."""
        ...

    def raw_blocks(self, name: str, rows: int, elements: int = 0) -> Iterator[Tensor]:
        """Yield a tensor of at least one dimension, `rows` rows at a time; a block is valid until the next one.

        elements: the numbers of the model that the tensor stands for.
        """
        ...

    def raw(self, name: str, elements: int = 0) -> Tensor:
        """Return a tensor, in memory of its own."""
        ...

    def skip(self, name: str) -> None:
        """Note that a tensor, if it is there, belongs to the model and is not needed."""
        ...


def checked(
    tensors: CheckpointTensors, name: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
) -> StoredTensor:
    """Return a tensor that has one of these shapes and dtypes; raises LoaderError, by the tensor's name, if not."""
    stored = tensors.require(name)
    if stored.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise LoaderError(f"{stored.path}: tensor {name} has shape {list(stored.shape)}, config.json needs {wanted}")
    if stored.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise LoaderError(f"{stored.path}: tensor {name} is {stored.stored_as}, config.json needs {wanted}")
    return stored


def check_scales(name: str, scales: Tensor) -> None:
    """Raise LoaderError, by the tensor's name, for scales that are not finite; those in uint8 are e8m0."""
    finite = scales != _E8M0_NAN if scales.dtype == torch.uint8 else scales.isfinite()
    if not bool(finite.all()):
        raise LoaderError(f"tensor {name} has scales that are NaN or infinite")


def check_group(name: str, group: int, columns: int) -> None:
    """Raise LoaderError, by the tensor's name, for a group of columns that no kernel has."""
    if group == columns or (columns % group == 0 and (group == 16 or group % 32 == 0)):
        return
    raise LoaderError(
        f"tensor {name}: groups of {group} columns of {columns} are not supported; supported: 16, multiples of 32, and "
        "all columns, in a number that divides the columns"
    )


def check_columns(name: str, columns: int, unit: int) -> None:
    """Raise LoaderError, by the tensor's name, for columns that do not fill the units they are packed in."""
    if columns % unit:
        raise LoaderError(f"tensor {name}: {columns} numbers do not fill units of {unit}, in which they are packed")
