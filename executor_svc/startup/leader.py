"""Rank 0's side of the start of a divided model."""

from __future__ import annotations

import os
import sys

from cadenza.telemetry.logs import report_error
from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import KVCache
from executor_svc.device.ranks import RankKernels, Share
from executor_svc.models.loading import LoadedModel
from executor_svc.models.parallel.split import check_split
from executor_svc.models.spec import DecoderSpec
from executor_svc.ranks.adapters import LeaderAdapters
from executor_svc.ranks.processes import RankProcesses
from executor_svc.ranks.steps import LeaderRanks
from executor_svc.startup.adapters import max_loaded
from executor_svc.startup.held import Held, held_by, least, own_memory, read_held
from executor_svc.startup.rank_checks import check_ranks
from executor_svc.startup.rank_kernels import ranks_in_memory, ranks_on_gpus, sizes_of
from executor_svc.worker.model_adapters import ModelAdapterLoader

EXIT_RANK = 5


class Leader:
    """Rank 0's side of the start."""

    def __init__(self, config: ExecutorConfig, device: Device) -> None:
        """Start the processes of the others, which load while this one does. Raises RanksError."""
        check_ranks(config, device)
        self._config, self._device, self._size = config, device, config.tensor_parallel_size
        options = {**config.model_dump(exclude_unset=True, mode="json"), "num_threads": device.num_threads}
        self._on_gpus = device.name != "cpu"
        if not self._on_gpus:
            self._processes = RankProcesses(self._size, options)
            return
        from executor_svc.gpu.visible import environment_of

        self._processes = RankProcesses(self._size, options, environment_of)
        # From the beginning: who waits in a collective operation for a rank that has ended waits for ever.
        self._processes.watch(_end)

    def join(self, spec: DecoderSpec) -> RankKernels:
        """Implements `models.loading.Join`."""
        check_split(spec, self._size)
        if self._on_gpus:
            return ranks_on_gpus(self._device, Share(0, self._size), self._processes.memory)
        sizes = sizes_of(self._config, spec)
        return ranks_in_memory(self._device, 0, sizes, self._processes.open_memory(sizes.num_bytes))

    def agree(self, loaded: LoadedModel, pools: KVCache, adapters: ModelAdapterLoader | None) -> Held:
        """Return what all ranks hold: the fewest blocks, and one digest. Raises StartError."""
        return read_held(self._processes.agree(held_by(loaded, pools, adapters), least))

    def begin(self, loaded: LoadedModel) -> LeaderRanks:
        """Return rank 0's side of steps, once all ranks wait for plans; their ends end this process from now on."""
        kernels = loaded.ranks
        assert kernels is not None
        self._processes.wait_until_ready()
        if not self._on_gpus:
            self._processes.watch(_end)
        return LeaderRanks(kernels, self._processes.links)

    def stop(self) -> None:
        """End the others: this process cannot start."""
        self._processes.stop()

    def make_adapters(self, loaded: LoadedModel) -> LeaderAdapters | None:
        """Return what loads the adapters of all ranks; None for a model without places for them."""
        if loaded.adapters is None:
            return None
        config, links = self._config, self._processes.adapter_links
        most = max_loaded(config, loaded.adapters, own_memory(self._device, config))
        return LeaderAdapters(loaded.adapters, most, links, roots=config.adapter_roots, base_table=loaded.base_table)


def _end(rank: int, how: str) -> None:
    """End this process, and with it the others: a replica with a rank less computes nothing."""
    report_error(f"rank {rank} ended: {how}; this executor ends", "executor_svc")
    sys.stderr.flush()
    os._exit(EXIT_RANK)
