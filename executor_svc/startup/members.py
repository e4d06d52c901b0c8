"""How the other ranks come to rank 0: the one place where it differs by --distributed-executor-backend."""

from __future__ import annotations

import time

from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device
from executor_svc.ranks.connected import ConnectedRanks
from executor_svc.ranks.hosts.credentials import read_credentials
from executor_svc.ranks.hosts.introduction import introduction
from executor_svc.ranks.hosts.listener import Listener
from executor_svc.ranks.hosts.places import RankPlace
from executor_svc.ranks.members import Members
from executor_svc.ranks.processes import RankProcesses


def start_members(config: ExecutorConfig, device: Device, place: RankPlace | None) -> Members:
    """Start the other ranks, or wait for those that something else starts. place: rank 0's, in that case.

    Raises StartError.
    """
    if place is None:
        options = {**config.model_dump(exclude_unset=True, mode="json"), "num_threads": device.num_threads}
        if device.name == "cpu":
            return RankProcesses(config.tensor_parallel_size, options)
        from executor_svc.gpu.visible import environment_of

        return RankProcesses(config.tensor_parallel_size, options, environment_of)
    listener = Listener(place, read_credentials(config), time.monotonic() + config.rank_connect_timeout_s)
    try:
        own = introduction(config, device.num_threads)
        return ConnectedRanks(listener, place.size, own, config.rank_connect_timeout_s)
    except BaseException:
        listener.close()
        raise
