"""What each of several executors on one machine gets of it: a GPU, or a part of the cores and of the memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from cadenza_launcher.services.checks import count_gpus
from cadenza_launcher.services.options import EXECUTOR, Setting

_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class ExecutorShare:
    """What one executor gets beside the arguments and the environment of all."""

    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


def executor_shares(
    count: int, settings: Mapping[str, Setting], environment: Mapping[str, str] | None = None
) -> dict[str, ExecutorShare]:
    """The shares of `count` executors by name: "executor" if it is alone, else "executor 0", "executor 1" and so on.

    Options that `settings` have are left as they are. By default the threads are the cores divided by the executors; on
    the CPU, the share of memory is divided too. With GPUs each executor has one for itself; with --device cuda and
    --num-gpu-blocks several may share one. Raises OptionError if there are too few. The options are the same for all,
    since the number of threads is a part of the fingerprint of numerics: requests move between equal ones only.
    """
    if count == 1:
        return {EXECUTOR: ExecutorShare()}
    names = [f"{EXECUTOR} {index}" for index in range(count)]
    if "simulate" in settings:
        return {name: ExecutorShare() for name in names}
    gpus = _gpus(settings, os.environ if environment is None else environment)
    if gpus and count > len(gpus):
        _check_sharing(count, len(gpus), settings)
    arguments = _arguments(count, settings, shares_memory=not gpus)
    return {
        name: ExecutorShare(list(arguments), {_GPUS: gpus[index % len(gpus)]} if gpus else {})
        for index, name in enumerate(names)
    }


def _check_sharing(count: int, num_gpus: int, settings: Mapping[str, Setting]) -> None:
    """Executors share GPUs only if that is meant, and if the memory of each is known."""
    there = f"there {'is' if num_gpus == 1 else 'are'} {num_gpus}"
    if _device(settings) == "auto":
        why = "with --device cuda executors share them, with --device cpu they use none"
        raise settings["executors"].refused("executors", f"{count} executors need a GPU each, and {there}; {why}")
    if "num_gpu_blocks" not in settings:
        raise settings["executors"].refused(
            "executors",
            f"{count} executors share GPUs, since {there}: --num-gpu-blocks must give the KV blocks of each",
        )


def _arguments(count: int, settings: Mapping[str, Setting], *, shares_memory: bool) -> list[str]:
    """The defaults of one of `count` executors."""
    from executor_svc.config import CPU_MEMORY_SHARE

    arguments = []
    if "num_threads" not in settings:
        arguments.append(f"--num-threads={max(1, _cores() // count)}")
    if shares_memory and not {"gpu_memory_utilization", "num_gpu_blocks"} & set(settings):
        arguments.append(f"--gpu-memory-utilization={CPU_MEMORY_SHARE / count:.4g}")
    return arguments


def _gpus(settings: Mapping[str, Setting], environment: Mapping[str, str]) -> list[str]:
    """The GPUs that executors may use, as CUDA_VISIBLE_DEVICES names them; none on the CPU."""
    if _device(settings) == "cpu" or environment.get("TRITON_INTERPRET") == "1":
        return []
    count = count_gpus()
    named = [name.strip() for name in environment.get(_GPUS, "").split(",") if name.strip()]
    return (named or [str(index) for index in range(count)])[:count]


def _device(settings: Mapping[str, Setting]) -> str:
    return str(settings["device"].value) if "device" in settings else "auto"


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
