"""A model's tensors: from the files of its folder, or random numbers of a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from executor_svc.models.folder import LoaderError, find_weights

_DUMMY_STD = 0.02


class Weights:
    """Tensors by name; each is read once, checked, converted and hashed. Base class of the sources below."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._torch_device = device
        self._hashes: dict[str, bytes] = {}
        self.num_parameters = 0

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        raise NotImplementedError

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a copy of a tensor in the model's dtype; raises LoaderError for a wrong shape or name."""
        # Copied even without a conversion: one view of a file's mapping keeps all of it resident.
        tensor = self._read(name, shape).to(self._dtype, copy=True).contiguous()
        self._hashes[name] = _hash(name, tensor)
        self.num_parameters += tensor.numel()
        return tensor.to(self._torch_device)

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

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor in the model's dtype; on a GPU it needs no other memory."""
        if self._torch_device.type == "cpu":
            return super().get(name, shape)
        tensor = self.draw(name, shape, self._torch_device)
        source = f"{name} {list(shape)} {self._dtype} seed {self._seed} {self._torch_device.type}"
        self._hashes[name] = hashlib.sha256(source.encode()).digest()
        self.num_parameters += tensor.numel()
        return tensor

    def draw(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return the tensor, drawn in place on a device, in the model's dtype."""
        tensor = torch.empty(shape, dtype=self._dtype, device=device)
        if "norm" in name:
            return tensor.fill_(1.0)
        return tensor.normal_(0.0, _DUMMY_STD, generator=self._generator(name, device))

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if "norm" in name:
            return torch.ones(shape)
        return torch.randn(shape, generator=self._generator(name, torch.device("cpu"))) * _DUMMY_STD

    def _generator(self, name: str, device: torch.device) -> torch.Generator:
        seed = int.from_bytes(hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:8], "little") >> 1
        return torch.Generator(device).manual_seed(seed)


class SafetensorsWeights(Weights):
    """Tensors of a folder's safetensors files, single or sharded, read one at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._folder = folder
        self._file_of = _tensor_files(folder)
        self._open_file: tuple[Path, Any] | None = None

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        path = self._file_of.get(name)
        if path is None:
            raise LoaderError(f"model folder {self._folder}: tensor {name} is missing")
        tensor = self._as_stored(name, path)
        if tuple(tensor.shape) != shape:
            raise LoaderError(f"{path}: tensor {name} has shape {list(tensor.shape)}, config.json says {list(shape)}")
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise LoaderError(f"{path}: tensor {name} is {tensor.dtype}; quantized checkpoints are not supported")
        return tensor

    def get_scales(self, name: str, count: int) -> Tensor | None:
        """As in `Weights`; scales are never rounded to the model's dtype."""
        path = self._file_of.get(name)
        if path is None:
            return None
        stored = self._as_stored(name, path)
        if stored.numel() != 1 and tuple(stored.shape) not in ((count,), (count, 1, 1)):
            raise LoaderError(
                f"{path}: tensor {name} has shape {list(stored.shape)}; scales are one number, or one for each of "
                f"{count} KV heads"
            )
        scales = stored.to(torch.float32, copy=True).flatten()
        if not bool(((scales > 0) & scales.isfinite()).all()):
            raise LoaderError(f"{path}: tensor {name} is {scales.tolist()}; scales must be finite and above 0")
        self._hashes[name] = _hash(name, scales)
        return scales.expand(count).contiguous()

    def _as_stored(self, name: str, path: Path) -> Tensor:
        """Return a view of a tensor in a file."""
        if self._open_file is None or self._open_file[0] != path:
            self._open_file = (path, _open(path))
        try:
            tensor: Tensor = self._open_file[1].get_tensor(name)
        except SafetensorError as error:
            raise LoaderError(f"{path}: tensor {name} cannot be read: {error}") from error
        return tensor

    def check_all_used(self, ignored: Callable[[str], bool]) -> None:
        """Raise LoaderError if the files hold tensors that the model has not read: they are of another model."""
        unused = sorted(name for name in self._file_of if name not in self._hashes and not ignored(name))
        if unused:
            shown = ", ".join(unused[:3]) + (", …" if len(unused) > 3 else "")
            raise LoaderError(
                f"model folder {self._folder}: {len(unused)} tensors that the model does not use: {shown}"
            )


def _hash(name: str, tensor: Tensor) -> bytes:
    """Return sha256 over name, shape, dtype and bytes of a tensor on the CPU."""
    content = hashlib.sha256(f"{name} {list(tensor.shape)} {tensor.dtype} ".encode())
    content.update(tensor.view(torch.uint8).numpy().data)
    return content.digest()


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise LoaderError(f"{path}: not a readable safetensors file: {error}") from error


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, from a sharded checkpoint's index or from the single file."""
    found = find_weights(folder)
    return found if isinstance(found, dict) else dict.fromkeys(_open(found).keys(), found)
