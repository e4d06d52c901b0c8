"""The GPU of each rank of one machine: its process sees no other."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from executor_svc.device.interface import DeviceError, is_interpreted

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def environment_of(rank: int) -> Mapping[str, str]:
    """Return the variables of the process of a rank: the GPU with its number among those that this process sees.

    Rank 0 is this process, and takes the first, PyTorch's default.
    """
    listed = [each.strip() for each in os.environ.get(_VISIBLE, "").split(",") if each.strip()]
    return {_VISIBLE: listed[rank] if rank < len(listed) else str(rank)}


def check_gpus(size: int) -> None:
    """Raise DeviceError, naming the option, for more ranks than PyTorch sees GPUs; Triton's interpreter needs none."""
    count = torch.cuda.device_count()
    if count < size and not is_interpreted():
        raise DeviceError(f"--tensor-parallel-size {size}: needs as many GPUs, one for each rank; PyTorch sees {count}")
