"""A model's tensors: from the files of its folder, or random numbers of a seed."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from executor_svc.models.folder import LoaderError, find_weights
from executor_svc.models.safetensors_file import StoredTensor, tensors_of

_DUMMY_STD = 0.02
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


class Weights:
    """Tensors by name; each is read once, checked, converted and hashed. Base class of the sources below.

    Several threads may read at once, each another tensor.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._torch_device = device
        self._hashes: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}

    @property
    def num_parameters(self) -> int:
        """Elements of the tensors that have been read."""
        return sum(self._counts.values())

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise LoaderError for a wrong shape or name."""

    def _stored_blocks(self, name: str, shape: tuple[int, ...], rows: int) -> Iterator[Tensor]:
        """Yield a tensor as it is stored, `rows` rows at a time; a block is valid until the next one."""
        raise NotImplementedError

    def open(self, name: str, shape: tuple[int, ...]) -> NamedWeight:
        """Return a tensor to be read later; raises LoaderError for a wrong shape or name at once."""
        self._check(name, shape)
        return NamedWeight(self, name, shape)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a copy of a tensor in the model's dtype; raises LoaderError for a wrong shape or name."""
        self._check(name, shape)
        tensor, first = torch.empty(shape, dtype=self._dtype), 0
        row_bytes = max(1, math.prod(shape[1:]) * self._dtype.itemsize)
        for block in self.blocks(name, shape, max(1, _BLOCK_BYTES // row_bytes)):
            tensor[first : first + len(block)] = block
            first += len(block)
        return tensor.to(self._torch_device)

    def blocks(self, name: str, shape: tuple[int, ...], rows: int) -> Iterator[Tensor]:
        """Yield a tensor in the model's dtype, on the CPU, `rows` rows at a time; a block is valid until the next one.

        The hash is of the very bytes that are yielded, whatever becomes of the file.
        """
        content = hashlib.sha256(f"{name} {list(shape)} {self._dtype} ".encode())
        count = 0
        for stored in self._stored_blocks(name, shape, rows):
            block = stored.to(self._dtype)
            content.update(block.reshape(-1).view(torch.uint8).numpy().data)
            count += block.numel()
            yield block
        self._hashes[name], self._counts[name] = content.digest(), count

    def get_scales(self, name: str, count: int) -> Tensor | None:
        """Return the scales of `count` heads, [count] float32 on the CPU, finite and above 0; None if there are none.

        A tensor of one number applies to all heads. Raises LoaderError for other shapes and numbers.
        """
        return None

    def digest(self) -> bytes:
        """Return sha256 over names, shapes, dtype and bytes of all loaded tensors, independent of their order."""
        return hashlib.sha256(b"".join(self._hashes[name] for name in sorted(self._hashes))).digest()


class DummyWeights(Weights):
    """Random weights that depend only on seed and tensor name; norms are 1, biases are as small as the others.

    A GPU draws its weights in its own memory: they differ from the CPU's, and possibly from another GPU's. The digest
    is then over seed, names, shapes and dtype, not over their bytes.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._seed = seed
        self._drawing = threading.Lock()
        """Held while a tensor is there as a whole, in float32: one at a time."""

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor in the model's dtype; on a GPU it needs no other memory."""
        if self._torch_device.type == "cpu":
            return super().get(name, shape)
        tensor = self.draw(name, shape, self._torch_device)
        source = f"{name} {list(shape)} {self._dtype} seed {self._seed} {self._torch_device.type}"
        self._hashes[name] = hashlib.sha256(source.encode()).digest()
        self._counts[name] = tensor.numel()
        return tensor

    def draw(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return the tensor, drawn in place on a device, in the model's dtype."""
        tensor = torch.empty(shape, dtype=self._dtype, device=device)
        if "norm" in name:
            return tensor.fill_(1.0)
        return tensor.normal_(0.0, _DUMMY_STD, generator=self._generator(name, device))

    def _stored_blocks(self, name: str, shape: tuple[int, ...], rows: int) -> Iterator[Tensor]:
        # Drawn as a whole: a number depends on the size of its tensor.
        with self._drawing:
            whole = torch.ones(shape)
            if "norm" not in name:
                whole = torch.randn(shape, generator=self._generator(name, torch.device("cpu"))).mul_(_DUMMY_STD)
            yield from whole.split(rows)

    def _generator(self, name: str, device: torch.device) -> torch.Generator:
        seed = int.from_bytes(hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:8], "little") >> 1
        return torch.Generator(device).manual_seed(seed)


class SafetensorsWeights(Weights):
    """Tensors of a folder's safetensors files, single or sharded, read block by block."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._folder = folder
        self._headers: dict[Path, dict[str, StoredTensor]] = {}
        self._file_of = self._tensor_files()

    def _tensor_files(self) -> dict[str, Path]:
        """Return the file of each tensor, from a sharded checkpoint's index or from the single file."""
        found = find_weights(self._folder)
        return found if isinstance(found, dict) else dict.fromkeys(self._header(found), found)

    def _header(self, path: Path) -> dict[str, StoredTensor]:
        if path not in self._headers:
            self._headers[path] = tensors_of(path)
        return self._headers[path]

    def _stored(self, name: str) -> StoredTensor:
        """Return a tensor that the folder's index names; raises LoaderError if its file lacks it."""
        path = self._file_of[name]
        stored = self._header(path).get(name)
        if stored is None:
            raise LoaderError(f"{path}: tensor {name} cannot be read: the file does not hold it")
        return stored

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._file_of:
            raise LoaderError(f"model folder {self._folder}: tensor {name} is missing")
        stored = self._stored(name)
        if stored.shape != shape:
            raise LoaderError(
                f"{stored.path}: tensor {name} has shape {list(stored.shape)}, config.json says {list(shape)}"
            )
        if stored.dtype is None or not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
            raise LoaderError(
                f"{stored.path}: tensor {name} is {stored.stored_as}; quantized checkpoints are not supported"
            )

    def _stored_blocks(self, name: str, shape: tuple[int, ...], rows: int) -> Iterator[Tensor]:
        return self._stored(name).blocks(rows)

    def get_scales(self, name: str, count: int) -> Tensor | None:
        """As in `Weights`; scales are never rounded to the model's dtype."""
        if name not in self._file_of:
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
        content = hashlib.sha256(f"{name} {list(scales.shape)} {scales.dtype} ".encode())
        content.update(scales.view(torch.uint8).numpy().data)
        self._hashes[name] = content.digest()
        return scales.expand(count).contiguous()

    def check_all_used(self, ignored: Callable[[str], bool]) -> None:
        """Raise LoaderError if the files hold tensors that the model has not read: they are of another model."""
        unused = sorted(name for name in self._file_of if name not in self._hashes and not ignored(name))
        if unused:
            shown = ", ".join(unused[:3]) + (", …" if len(unused) > 3 else "")
            raise LoaderError(
                f"model folder {self._folder}: {len(unused)} tensors that the model does not use: {shown}"
            )
