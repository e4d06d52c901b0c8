"""Which rank a process is that something else has started: from the variables of torchrun or of a LeaderWorkerSet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from executor_svc.errors import StartError

_DEFAULT_PORT = 50053
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
_GROUP = ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS")
_EXTERNAL = "--distributed-executor-backend external"


class PlaceError(StartError):
    """The variables of a rank are missing or contradict each other or an option; the message names them."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank in its replica."""

    rank: int
    size: int
    local_rank: int
    """Among those on its machine."""
    local_size: int
    """How many of them share its machine."""
    host: str
    """Where rank 0 listens."""
    port: int

    @property
    def target(self) -> str:
        """Where rank 0 listens, for messages."""
        return f"{self.host}:{self.port}"


def read_place(environment: Mapping[str, str], size: int | None, port: int | None) -> RankPlace:
    """Return the place that the variables give.

    size, port: those of --tensor-parallel-size and --rank-port, where they are given. Raises PlaceError.
    """
    names = _GROUP if not set(_TORCHRUN) & environment.keys() and set(_GROUP) & environment.keys() else _TORCHRUN
    for name in names:
        if not environment.get(name):
            raise PlaceError(
                f"{name} is not set: {_EXTERNAL} needs {', '.join(_TORCHRUN)}, as torchrun sets them, or "
                f"{', '.join(_GROUP)}, as a LeaderWorkerSet does"
            )
    rank_name, size_name, host_name = names
    world = _number(environment, size_name, 1, 1 << 15)
    rank = _number(environment, rank_name, 0, world - 1)
    if size is not None and size != world:
        raise PlaceError(f"{size_name}={world} is not --tensor-parallel-size {size}")
    local_size = _number(environment, "LOCAL_WORLD_SIZE", 1, world, 1)
    local_rank = _number(environment, "LOCAL_RANK", 0, local_size - 1, 0)
    if port is None:
        master = _number(environment, "MASTER_PORT", 1, 65534, _DEFAULT_PORT - 1)
        port = master + 1
    return RankPlace(rank, world, local_rank, local_size, environment[host_name], port)


def _number(environment: Mapping[str, str], name: str, least: int, most: int, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise PlaceError(f"{name}={text}: must be a number from {least} to {most}")
    return int(text)
