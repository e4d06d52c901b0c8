"""Chooses the device that runs the model."""

from __future__ import annotations

import torch

from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device, DeviceError, is_interpreted


def make_device(config: ExecutorConfig) -> Device:
    """Return the device of the options; `auto`: a GPU if there is one, else the CPU.

    Loading a model sets its dtype. Raises DeviceError for a device, dtype or instruction set that is not available.
    """
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if on_gpu and config.cpu_isa != "auto":
        raise DeviceError(f"--cpu-isa {config.cpu_isa} is not possible on a GPU: it needs --device cpu")
    if on_gpu and not (torch.cuda.is_available() or is_interpreted()):
        raise DeviceError("--device cuda: PyTorch sees no GPU here; use --device cpu")
    # Imported here: each device has libraries of its own.
    if on_gpu:
        try:
            from executor_svc.gpu.device import GpuDevice
        except ImportError as error:
            raise DeviceError(f"--device cuda: {error}; PyTorch for CUDA brings Triton with it") from error
        return GpuDevice(config)
    from executor_svc.cpu.device import CpuDevice

    return CpuDevice(config)
