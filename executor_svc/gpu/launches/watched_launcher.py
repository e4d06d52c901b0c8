"""Triton's launcher, of version 3.6, which tells `noting` of each launch in the form in which it can be repeated."""

from __future__ import annotations

from functools import partial
from inspect import getclosurevars
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc

from executor_svc.gpu.launches.noting import Call, noting_now

_NO_HOOKS = None, None, None
"""In the places of what a launch tells hooks, of the hook before it, and of the hook after it."""


def _together(*args: Any) -> tuple[Any, ...]:
    return args


class WatchedLauncher(CudaLauncher):  # type: ignore[misc]
    """Launches a compiled kernel as `CudaLauncher` does."""

    def __init__(self, src: Any, metadata: Any) -> None:
        super().__init__(src, metadata)
        # With descriptors, `launch` is a function around Triton's compiled one that encodes them at each launch.
        wrapped = isinstance(self.launch, FunctionType)
        self._compiled = getclosurevars(self.launch).nonlocals["launcher"] if wrapped else self.launch
        self._encoded = wrap_handle_tensordesc(_together, src.signature, getattr(metadata, "tensordesc_meta", None))

    def __call__(self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any) -> None:
        super().__call__(gridX, gridY, gridZ, stream, function, *args)
        noting = noting_now()
        if noting is not None:
            memory = [each.base if hasattr(each, "base") else each for each in args]
            call = self._repeated((gridX, gridY, gridZ, stream, function), args)
            noting.add_kernel(call, *(each for each in memory if isinstance(each, Tensor)))

    def _repeated(self, where: tuple[int, ...], args: tuple[Any, ...]) -> Call | None:
        """Return a call of the compiled launcher alone, with addresses in the place of tensors."""
        if self.global_scratch_size or self.profile_scratch_size:
            return None
        packed_metadata, _, _, _, *bound = args
        options = self.launch_cooperative_grid, self.launch_pdl, None, None
        encoded = self._encoded(*where, *options, packed_metadata, *_NO_HOOKS, *bound)
        return partial(self._compiled, *map(_address, encoded))


def _address(argument: Any) -> Any:
    """Return the address of a tensor of the device; of others, in pinned memory of the host, Triton asks the driver."""
    if not isinstance(argument, Tensor) or (argument.device.type == "cpu" and torch.cuda.is_available()):
        return argument
    return argument.data_ptr()
