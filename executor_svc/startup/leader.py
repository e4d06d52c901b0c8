"""Rank 0's side of the start of a divided model."""

from __future__ import annotations

import os
import sys
import time

from cadenza_common.telemetry.logs import report_error
from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import DraftLayers, KVCache
from executor_svc.device.ranks import RankKernels
from executor_svc.models.loading import LoadedModel
from executor_svc.models.parallel.split import check_split
from executor_svc.models.specs.spec import DecoderSpec
from executor_svc.ranks.adapters import LeaderAdapters
from executor_svc.ranks.connected import ConnectedRanks, introduction
from executor_svc.ranks.hosts.credentials import read_credentials
from executor_svc.ranks.hosts.listener import Listener
from executor_svc.ranks.hosts.places import RankPlace
from executor_svc.ranks.links import Frame
from executor_svc.ranks.members import EXIT_RANK, Members
from executor_svc.ranks.processes import RankProcesses
from executor_svc.ranks.steps import LeaderRanks
from executor_svc.startup.adapters import max_loaded
from executor_svc.startup.held import Held, draft_layers_message, held_by, least, own_memory, read_held
from executor_svc.startup.rank_checks import check_ranks, ranks_on_host
from executor_svc.startup.rank_kernels import make_ranks
from executor_svc.worker.model_adapters import ModelAdapterLoader


class Leader:
    """Rank 0's side of the start."""

    def __init__(self, config: ExecutorConfig, device: Device, place: RankPlace | None) -> None:
        """Start the others, or wait for them; they load while this one does. place: of one that something else has
        started. Raises StartError."""
        check_ranks(config, device)
        self._config, self._device = config.sized_for(device.name), device
        self._size = config.tensor_parallel_size
        self._on_host, self._on_gpus = ranks_on_host(config, place), device.name != "cpu"
        self._members = start_members(config, device, place)
        if self._on_gpus:
            # From the beginning: who waits in a collective operation for a rank that has ended waits for ever.
            self._members.watch(_end)

    def join(self, spec: DecoderSpec) -> RankKernels:
        """Implements `models.loading.Join`."""
        check_split(spec, self._size)
        return make_ranks(self._device, 0, self._config, spec, self._members.exchanges, self._members.meet)

    def send_draft_layers(self, draft: DraftLayers | None) -> None:
        """Send the others the layers that a draft adds to this one's blocks; raises StartError."""
        self._members.tell(Frame.LAYERS, draft_layers_message(draft))

    def agree(self, loaded: LoadedModel, pools: KVCache, adapters: ModelAdapterLoader | None) -> Held:
        """Return what all ranks hold: the fewest blocks, and one digest. Raises StartError."""
        return read_held(self._members.agree(held_by(loaded, pools, adapters, self._device), least))

    def begin(self, loaded: LoadedModel) -> LeaderRanks:
        """Return rank 0's side of steps, once all ranks wait for plans; their ends end this process from now on."""
        kernels = loaded.ranks
        assert kernels is not None
        self._members.wait_until_ready()
        if not self._on_gpus:
            self._members.watch(_end)
        return LeaderRanks(kernels, self._members.links)

    def stop(self) -> None:
        """End the others: this process cannot start."""
        self._members.stop()

    def make_adapters(self, loaded: LoadedModel) -> LeaderAdapters | None:
        """Return what loads the adapters of all ranks; None for a model without places for them."""
        if loaded.adapters is None:
            return None
        config, links = self._config, self._members.adapter_links
        most = max_loaded(config, loaded.adapters, own_memory(self._device, self._on_host))
        return LeaderAdapters(loaded.adapters, most, links, roots=config.adapter_roots, base_table=loaded.base_table)


def _end(rank: int, how: str) -> None:
    """End this process, and with it the others: a replica with a rank less computes nothing."""
    report_error(f"rank {rank} ended: {how}; this executor ends", "executor_svc")
    sys.stderr.flush()
    os._exit(EXIT_RANK)


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
