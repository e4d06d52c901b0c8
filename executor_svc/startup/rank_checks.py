"""What is possible with the ranks of a divided model, and the cores of each."""

from __future__ import annotations

from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device, cores
from executor_svc.errors import StartError
from executor_svc.ranks.hosts.places import RankPlace


class RanksError(StartError):
    """The options of ranks contradict others, or the machine; the message names them."""


def check_ranks(config: ExecutorConfig, device: Device) -> None:
    """Raise RanksError for options that are not possible with ranks."""
    option = f"--tensor-parallel-size {config.tensor_parallel_size}"
    if device.name != "cpu":
        if config.distributed_executor_backend != "mp":
            backend = f"--distributed-executor-backend {config.distributed_executor_backend}"
            raise RanksError(f"{backend} is possible on the CPU only so far: it needs --device cpu")
        _check_on_gpus(config, option)
    others = ("--inject", config.inject), ("--simulate", config.simulate), ("--save-quantized", config.save_quantized)
    for name, value in others:
        if value is not None:
            raise RanksError(f"{option} is not possible with {name}")


def ranks_on_host(config: ExecutorConfig, place: RankPlace | None) -> int:
    """Return how many ranks share this machine; place: of one that something else has started."""
    return config.tensor_parallel_size if place is None else place.local_size


def threads_of(config: ExecutorConfig, place: RankPlace | None = None) -> ExecutorConfig:
    """Return the options of one rank of this machine: its share of the cores, unless an option says how many."""
    threads = config.num_threads or max(1, cores() // ranks_on_host(config, place))
    return config.model_copy(update={"num_threads": threads})


def _check_on_gpus(config: ExecutorConfig, option: str) -> None:
    from executor_svc.gpu.visible import check_gpus

    check_gpus(config.tensor_parallel_size)
    if config.speculative in ("draft", "eagle3", "mtp") or config.speculative_model is not None:
        raise RanksError(
            f"{option} is not possible on GPUs with a draft model or head so far; there are --speculative ngram, "
            "suffix, auto"
        )
