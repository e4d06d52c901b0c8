"""What each process on Ray gets of its machine: a GPU, or processors and a part of the memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cadenza.errors import OptionError
from cadenza_launcher.on_ray.cluster import Machine


@dataclass(frozen=True, slots=True)
class RankShare:
    """Of one rank."""

    bundle: dict[str, float]
    """What Ray is asked for."""
    arguments: list[str]
    """Arguments of this executor alone; others are common to all executors."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Of an executor."""

    bundle: dict[str, float]
    """What each of its actors has."""
    num_actors: int
    """1: an actor runs the executor, with all of its ranks; else one runs each rank."""
    strategy: str
    """Of a placement group, as Ray names it."""


def placement_of(values: Mapping[str, Any], share: RankShare) -> Placement:
    """Return the placement that the option ray_placement asks for; share: that of a rank.

    By itself a bundle has all ranks of an executor, which so are on one machine, and bundles are on different ones.
    """
    ranks, asked = values.get("tensor_parallel_size", 1), values.get("ray_placement", "auto")
    if asked == "auto":
        return Placement({name: ranks * count for name, count in share.bundle.items()}, 1, "SPREAD")
    return Placement(share.bundle, ranks, asked.replace("-", "_").upper())


def rank_share(values: Mapping[str, Any], machines: Sequence[Machine], num_executors: int) -> RankShare:
    """Return the share of a rank where `num_executors` are to find room; raises OptionError.

    The same for all: the number of threads is a part of the fingerprint of numerics, and requests move between equal
    ones only. A GPU for each rank where there are GPUs; else the processors of the smallest machine, divided by the
    ranks that come to each machine.
    """
    if not machines:
        raise OptionError("option ray_address: the Ray cluster has no machine that is alive")
    ranks = values.get("tensor_parallel_size", 1)
    if values.get("simulate") is not None:
        return RankShare({"CPU": 1.0}, [])
    with_gpus = [each for each in machines if each.num_gpus >= 1]
    device = values.get("device", "auto")
    if device == "cuda" or (device == "auto" and with_gpus):
        if not with_gpus:
            raise OptionError("option device: cuda: no machine of the Ray cluster has a GPU")
        return RankShare({"GPU": 1.0}, ["--device=cuda"])
    with_cpus = [each for each in machines if each.num_cpus >= 1] or list(machines)
    executors_each = math.ceil(num_executors / len(with_cpus))
    threads = values.get("num_threads")
    if threads is None:
        smallest = min(each.num_cpus for each in with_cpus)
        threads = max(1, int(smallest) // (executors_each * ranks))
    arguments = ["--device=cpu", f"--num-threads={threads}"]
    if not {"gpu_memory_utilization", "num_gpu_blocks"} & set(values):
        from executor_svc.config import CPU_MEMORY_SHARE

        arguments.append(f"--gpu-memory-utilization={CPU_MEMORY_SHARE / executors_each:.4g}")
    return RankShare({"CPU": float(threads)}, arguments)
