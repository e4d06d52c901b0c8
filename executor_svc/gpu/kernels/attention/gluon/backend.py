"""`--attention-backend gluon`: for which of a model's layers the Gluon kernel attends, found out at the start."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from executor_svc.device.interface import DeviceError
from executor_svc.device.kernels import AttentionShape
from executor_svc.gpu.kernels.attention.config import AttentionKind
from executor_svc.gpu.kernels.attention.gluon.compare import compare
from executor_svc.gpu.kernels.attention.gluon.tiles import ARCH, BLOCKS, why_not

_log = logging.getLogger(__name__)
_OPTION = "--attention-backend gluon"


class PromptBackend:
    """What is known of attention of prompts by the Gluon kernel, by shape."""

    def __init__(self, device: torch.device, arch: int, block_size: int, *, exact: bool) -> None:
        """Raise DeviceError, naming the option, where the kernel cannot run or may not."""
        if exact:
            raise DeviceError(f"{_OPTION} is not possible with --numerics exact, which has kernels of its own")
        if arch != ARCH:
            has, needs = (f"{each // 10}.{each % 10}" for each in (arch, ARCH))
            raise DeviceError(f"{_OPTION} needs a GPU of compute capability {needs}, this has {has}")
        if block_size not in BLOCKS:
            raise DeviceError(f"{_OPTION} needs --block-size {', '.join(map(str, BLOCKS))}")
        self._device, self._arch, self._block_size = device, arch, block_size
        self.dtypes = torch.bfloat16, torch.bfloat16
        """Of queries and of the cache."""
        self._found: dict[tuple[object, ...], bool] = {}

    def serves(self, shape: AttentionShape) -> bool:
        """Return whether the kernel attends for these layers, which is found out once, and logged if it does not.

        Raises DeviceError if its results are not those of Triton's kernel; they are compared on a GPU alone.
        """
        key = replace(shape, scale=1.0), self.dtypes
        if key not in self._found:
            self._found[key] = self._find_out(shape)
        return self._found[key]

    def _find_out(self, shape: AttentionShape) -> bool:
        dtype, kv_dtype = self.dtypes
        size, window = shape.padded_head_size, shape.window is not None or shape.chunk is not None
        more = 0 if shape.latent is None else 1
        lacking = why_not(AttentionKind(size, dtype, kv_dtype, self._block_size, shape.group, window, more=more))
        heads = f"{shape.num_heads} heads of {shape.head_size}"
        if lacking is not None:
            _log.warning("%s: Triton's kernel attends for %s: Gluon's does not have %s", _OPTION, heads, lacking)
            return False
        wrong = None
        if self._device.type == "cuda":
            wrong = compare(shape, dtype, self._block_size, self._device, self._arch)
        if wrong is not None:
            raise DeviceError(f"{_OPTION}: attention of {heads}: {wrong}; use --attention-backend triton")
        return True
