"""LoRA adapters from the options: the places of a model, and what loads them."""

from __future__ import annotations

import logging
from dataclasses import replace

import psutil

from executor_svc.config import ExecutorConfig
from executor_svc.device.adapters import AdapterKernels
from executor_svc.device.interface import Device, DeviceError
from executor_svc.models.adapters.places import AdapterSizes, ModelAdapters
from executor_svc.models.loading import LoadedModel
from executor_svc.plan.limits import Limits
from executor_svc.worker.model_adapters import ModelAdapterLoader

_log = logging.getLogger(__name__)

_SHARE = 0.1
"""Of the free memory, which the default of --max-cpu-loras may take."""


def adapter_sizes(config: ExecutorConfig, device: Device) -> AdapterSizes | None:
    """Return the sizes of a model's places for adapters; None: it has none.

    On a GPU places take memory, and graphs time at the start: there are none unless --max-loras is given.
    """
    if not config.max_loras or not isinstance(device.kernels, AdapterKernels):
        return None
    if device.name != "cpu" and "max_loras" not in config.model_fields_set:
        return None
    return AdapterSizes(config.max_loras, config.max_lora_rank)


def make_adapters(
    config: ExecutorConfig, device: Device, loaded: LoadedModel, on_host: int = 1
) -> ModelAdapterLoader | None:
    """Return what loads a model's adapters; None for a model without places for them. on_host: ranks of this machine.

    Raises DeviceError, naming the options, for more adapters than memory could hold.
    """
    model = loaded.adapters
    if model is None:
        if config.max_loras and not loaded.recordable:
            _log.info("no LoRA adapters: %s runs through transformers' own code", loaded.geometry.architecture)
        elif config.max_loras and device.name == "cpu":
            _log.info("no LoRA adapters: this file has the model's factors in its weights, which adapters need apart")
        return None
    # Packed adapters lie in the host's memory, whatever the device.
    free = device.free_memory_bytes() if device.name == "cpu" else int(psutil.virtual_memory().available)
    most = max_loaded(config, model, free // on_host)
    return ModelAdapterLoader(model, most, roots=config.adapter_roots, base_table=loaded.base_table)


def held_on_cpu(adapters: ModelAdapterLoader | None, device: Device) -> int:
    """Return the bytes of a CPU's memory that adapters may take, which KV blocks do not get; 0 on another device."""
    return 0 if adapters is None or device.name != "cpu" else adapters.max_bytes


def with_adapters(limits: Limits, adapters: ModelAdapterLoader | None) -> Limits:
    """Return the limits of an executor with these adapters."""
    if adapters is None:
        return limits
    return replace(limits, max_loras=adapters.num_places, max_cpu_loras=adapters.max_loaded)


def max_loaded(config: ExecutorConfig, model: ModelAdapters, free: int) -> int:
    """Return the most loaded adapters: those of the option, or of its default as many as the share of memory holds."""
    each, most = model.bytes_of_rank(config.max_lora_rank), config.max_cpu_loras
    if "max_cpu_loras" not in config.model_fields_set:
        return max(config.max_loras, min(most, int(_SHARE * free) // each))
    if most * each >= free:
        raise DeviceError(
            f"--max-cpu-loras {most} adapters of --max-lora-rank {config.max_lora_rank} take {most * each} bytes, "
            f"{free} bytes of memory are free"
        )
    return most
