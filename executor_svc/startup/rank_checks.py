"""What is possible with the ranks of a divided model, and the cores of each."""

from __future__ import annotations

from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device, cores
from executor_svc.errors import StartError
from executor_svc.ranks.hosts.places import Place


class RanksError(StartError):
    """The options of ranks contradict others, or the machine; the message names them."""


def check_ranks(config: ExecutorConfig, device: Device) -> None:
    """Raise RanksError for options that are not possible with ranks."""
    option = f"--tensor-parallel-size {config.tensor_parallel_size}"
    if device.name != "cpu":
        raise RanksError(f"{option} is possible on the CPU only so far: it needs --device cpu")
    for name, value in (("--inject", config.inject), ("--simulate", config.simulate)):
        if value is not None:
            raise RanksError(f"{option} is not possible with {name}")
    if config.speculative in ("eagle3", "mtp"):
        raise RanksError(f"{option} is not possible with --speculative {config.speculative} so far")


def ranks_on_host(config: ExecutorConfig, place: Place | None) -> int:
    """Return how many ranks share this machine; place: of one that something else has started."""
    return config.tensor_parallel_size if place is None else place.local_size


def threads_of(config: ExecutorConfig, place: Place | None = None) -> ExecutorConfig:
    """Return the options of one rank of this machine: its share of the cores, unless an option says how many."""
    threads = config.num_threads or max(1, cores() // ranks_on_host(config, place))
    return config.model_copy(update={"num_threads": threads})
