"""A model's tensors as random numbers of a seed, for `--load-format dummy`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from executor_svc.models.files.named_weights import Weights

_STD = 0.02
_DRAWN_TOGETHER = 16
_DRAWN = 4096 * _DRAWN_TOGETHER
"""Numbers that are drawn at a time."""


class DummyWeights(Weights):
    """Random weights that depend only on seed and tensor name; norms are 1, biases are as small as the others.

    A GPU draws its weights in its own memory: they differ from the CPU's, and possibly from another GPU's. The digest
    is then over seed, names, shapes and dtype, not over their bytes.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._seed = seed

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor in dtype, by default the model's; on a GPU it needs no other memory."""
        if self._torch_device.type == "cpu" or dtype is not None:
            return super().get(name, shape, dtype)
        tensor = self.draw(name, shape, self._torch_device)
        source = f"{name} {list(shape)} {self._dtype} seed {self._seed} {self._torch_device.type}"
        self._hashes[name] = hashlib.sha256(source.encode()).digest()
        self._counts[name] = tensor.numel()
        return tensor

    def draw(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return the tensor, drawn in place on a device, in the model's dtype."""
        tensor = torch.empty(shape, dtype=self._dtype, device=device)
        if _is_norm(name):
            return tensor.fill_(1.0)
        return tensor.normal_(0.0, _STD, generator=self._generator(name, device))

    def _stored_blocks(self, name: str, shape: tuple[int, ...], rows: int) -> Iterator[Tensor]:
        if _is_norm(name):
            yield from torch.ones(shape).split(rows)
            return
        block = torch.empty(min(rows, shape[0]), *shape[1:])
        flat, filled = block.view(-1), 0
        for drawn in _draw(math.prod(shape), self._generator(name, torch.device("cpu"))):
            rest = drawn.mul_(_STD)
            while rest.numel():
                part = rest[: flat.numel() - filled]
                flat[filled : filled + part.numel()] = part
                rest, filled = rest[part.numel() :], filled + part.numel()
                if filled == flat.numel():
                    yield block
                    filled = 0
        if filled:
            yield flat[:filled].view(-1, *shape[1:])

    def _generator(self, name: str, device: torch.device) -> torch.Generator:
        seed = int.from_bytes(hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:8], "little") >> 1
        return torch.Generator(device).manual_seed(seed)


def _is_norm(name: str) -> bool:
    """Return whether a tensor is of a norm, such as input_layernorm, ln_1 or ln_attn."""
    return "norm" in name or ".ln_" in name


def _draw(count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield `count` normal numbers in fp32, those of one draw of them all, in memory that is used again.

    PyTorch draws 16 at a time, and the last 16 of a draw again if they are not whole: so a piece has a multiple of 16,
    and the last one 16 or more if there are as many.
    """
    buffer = torch.empty(min(count, _DRAWN + _DRAWN_TOGETHER))
    ends = [*range(_DRAWN, count - _DRAWN_TOGETHER + 1, _DRAWN), count]
    for start, end in pairwise([0, *ends]):
        yield buffer[: end - start].normal_(generator=generator)
