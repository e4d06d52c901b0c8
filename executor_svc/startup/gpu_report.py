"""What the start of an executor on a GPU takes: seconds by part, kernels, and memory as computed and as measured."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from cadenza_common.plan.memory import MemoryPart
from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device
from executor_svc.models.loading import LoadedModel
from executor_svc.startup.speculation import Draft, model_on_gpu

_log = logging.getLogger(__name__)
_GIB = 1 << 30
LEAST_LENGTH = 16
"""The least max_model_len of a model that is compared: tokens of the shortest sequences, with what follows them."""


@dataclass(frozen=True, slots=True)
class _Seconds:
    part: str
    seconds: float


class StartReport:
    """Seconds and bytes of the parts of a start, in their order; on a CPU of seconds alone."""

    def __init__(self, device: Device) -> None:
        """Begin: what the device's memory holds now is not this model's."""
        self._device = device.torch_device
        self._on_gpu = device.torch_device.type == "cuda"
        self._seconds: list[_Seconds] = []
        self.memory: list[MemoryPart] = []
        self._used_before = self._used()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure the seconds of what is done inside."""
        began = time.monotonic()
        yield
        self._seconds.append(_Seconds(name, time.monotonic() - began))

    def takes(self, name: str, computed: int) -> None:
        """Note how many bytes a part has taken since the last note, beside what was computed for it."""
        if not self._on_gpu:
            return
        used = self._used()
        self.memory.append(MemoryPart(name, computed, used - self._used_before))
        self._used_before = used

    def ends(self, config: ExecutorConfig, step_bytes: int) -> None:
        """Say how long the start took, since the process began, and what the device's memory holds.

        step_bytes: computed for steps, beside what is left for graphs.
        """
        if not self._on_gpu:
            return
        from executor_svc.gpu.compiled.kernel_cache import COMPILED
        from executor_svc.gpu.device import BYTES_FOR_GRAPHS, MEMORY_SHARE

        self.takes("steps and graphs", step_bytes + BYTES_FOR_GRAPHS)
        since = time.time() - psutil.Process().create_time()
        parts = ", ".join(f"{each.part} {each.seconds:.1f}" for each in self._seconds)
        _log.info("ready %.1f s after the start of the process (%s); %s", since, parts, COMPILED)
        free, total = torch.cuda.mem_get_info(self._device)
        bound = int((config.gpu_memory_utilization or MEMORY_SHARE) * total)
        say = _log.warning if total - free > bound and config.num_gpu_blocks is None else _log.info
        say("memory of the GPU: %s", memory_text(self.memory, total - free, total, bound))

    def _used(self) -> int:
        """Return the bytes in use on the device, as it reports them; what PyTorch only keeps is given back first."""
        if not self._on_gpu:
            return 0
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)


@dataclass(frozen=True, slots=True)
class ComparedKernels:
    """What a start does otherwise, as kernels are not right."""

    for_graphs: bool = True
    """Whether steps are for CUDA graphs: not if PyTorch stands in for attention, by thousands of operations."""
    has_passes: bool = True
    """Whether a draft model or head on the GPU may draft: not if what prepares its passes is off."""


def check_kernels(config: ExecutorConfig, device: Device, loaded: LoadedModel, draft: Draft | None) -> ComparedKernels:
    """Compare the kernels of a model, of its draft model or head, and of what surrounds it in steps, with references.

    With --kernel-checks report what is wrong is logged, with off nothing is compared. Raises KernelError, naming what
    has no right way to be computed. Models through transformers are not compared; a rank compares its own part, and
    waits for no other.
    """
    if device.torch_device.type != "cuda" or not loaded.recordable:
        return ComparedKernels()
    length, why = loaded.geometry.max_model_len, None
    if config.kernel_checks == "off":
        why = "--kernel-checks off"
    elif length < LEAST_LENGTH:
        why = f"max_model_len is {length}, {LEAST_LENGTH} are needed"
    if why is not None:
        _log.warning("kernels: not compared (%s); wrong ones would give wrong tokens", why)
        return ComparedKernels()
    from executor_svc.gpu.checks.model_check import ModelCheck, compare_models
    from executor_svc.gpu.checks.steps.step_check import StepCheck
    from executor_svc.gpu.device import GpuDevice

    assert isinstance(device, GpuDevice)
    layers = None if draft is None else draft.layers
    models = [ModelCheck(loaded, device, config, device.choices, layers)]
    if draft is not None:
        models.append(ModelCheck(loaded, device, config, device.choices, layers, draft.model))
    steps = StepCheck(loaded, device, config, device.choices, layers, model_on_gpu(draft, device))
    found = compare_models(models, steps)
    return ComparedKernels(not found.is_slow, found.has_passes)


def memory_text(parts: list[MemoryPart], used: int, total: int, bound: int) -> str:
    """Return the parts as computed and as measured, what the device reports in all, and the bound for it, in GiB."""
    each = [f"{part.name} {part.computed / _GIB:.2f} computed, {part.measured / _GIB:.2f} measured" for part in parts]
    computed, (of_all, most, wanted) = (
        sum(part.computed for part in parts),
        (size / _GIB for size in (used, total, bound)),
    )
    each.append(f"in all {computed / _GIB:.2f} computed, the device reports {of_all:.2f} of {most:.2f} GiB in use")
    return "; ".join([*each, f"at most {wanted:.2f} are wanted"])
