"""What is possible with the ranks of a divided model, and the cores of each."""

from __future__ import annotations

from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device, cores
from executor_svc.errors import StartError


class RanksError(StartError):
    """The options of ranks contradict others, or the machine; the message names them."""


def check_ranks(config: ExecutorConfig, device: Device) -> None:
    """Raise RanksError for options that are not possible with ranks."""
    option = f"--tensor-parallel-size {config.tensor_parallel_size}"
    if device.name != "cpu":
        raise RanksError(f"{option} is possible on the CPU only so far: it needs --device cpu")
    others = ("--inject", config.inject), ("--simulate", config.simulate), ("--save-quantized", config.save_quantized)
    for name, value in others:
        if value is not None:
            raise RanksError(f"{option} is not possible with {name}")


def threads_of(config: ExecutorConfig) -> ExecutorConfig:
    """Return the options of one rank of this machine: its share of the cores, unless an option says how many."""
    threads = config.num_threads or max(1, cores() // config.tensor_parallel_size)
    return config.model_copy(update={"num_threads": threads})
