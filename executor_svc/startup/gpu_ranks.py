"""A model that is divided among the GPUs of one machine: builds the executor of each rank.

From the first collective operation on the ranks run the same steps, those of the trial and of warm-up too, each by
itself; plans come once all are ready.
"""

from __future__ import annotations

import gc
import json
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from cadenza_common.telemetry.logs import report_error
from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import KVCache
from executor_svc.device.ranks import RankKernels
from executor_svc.errors import StartError
from executor_svc.models.loading import LoadedModel, load_model
from executor_svc.models.parallel.split import check_split
from executor_svc.models.sampling_defaults import sampling_defaults
from executor_svc.models.specs.spec import DecoderSpec
from executor_svc.plan.description import Description, describe, limits_of
from executor_svc.ranks.links import Frame
from executor_svc.ranks.members import Joined
from executor_svc.ranks.steps import MemberRanks
from executor_svc.startup.adapters import adapter_sizes, make_adapters, with_adapters
from executor_svc.startup.executors import run_trial
from executor_svc.startup.fingerprint import fingerprint
from executor_svc.startup.gpu_report import check_kernels
from executor_svc.startup.held import Held, held_by, limit_adapters, read_held
from executor_svc.startup.leader import Leader
from executor_svc.startup.rank_kernels import make_ranks
from executor_svc.startup.speculation import make_draft_source
from executor_svc.worker.model_adapters import ModelAdapterLoader

if TYPE_CHECKING:
    from executor_svc.gpu.step import GpuStepExecutor

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _RankPart:
    """A rank's part of the model, and its memory for keys and values."""

    config: ExecutorConfig
    device: Device
    loaded: LoadedModel
    adapters: ModelAdapterLoader | None
    pools: KVCache | None = None

    def make_pools(self) -> KVCache:
        """Reserve as much as fits beside the largest steps, which run on all ranks for that."""
        step_bytes = 0
        if self.device.torch_device.type == "cuda":
            from executor_svc.gpu.device import BYTES_FOR_GRAPHS
            from executor_svc.gpu.measuring import peak_bytes_of

            trial = partial(run_trial, self.loaded, self.device, self.config)
            step_bytes = peak_bytes_of(trial, self.device.torch_device)
            if self.adapters is not None:
                step_bytes += BYTES_FOR_GRAPHS
        self.pools = self.device.new_kv_cache(self.loaded.own_geometry, self.config, step_bytes)
        return self.pools

    def executor(self, held: Held) -> tuple[GpuStepExecutor, KVCache]:
        """Return the executor over as many blocks as all ranks have, warmed up."""
        from executor_svc.gpu.step import GpuStepExecutor
        from executor_svc.gpu.warm_up import run_steps

        config, device = self.config, self.device
        limit_adapters(self.adapters, held)
        pools = self._with_pages(held.num_device_blocks)
        limits = with_adapters(limits_of(config, self.loaded.geometry, pools), self.adapters)
        drafts = make_draft_source(config, limits, None, device, pools, None)
        executor = GpuStepExecutor(
            self.loaded, device, pools, limits, enforce_eager=config.enforce_eager, drafts=drafts,
            adapters=self.adapters,
        )  # fmt: skip
        if device.torch_device.type == "cuda":
            run_steps(executor)
        return executor, pools

    def _with_pages(self, num_pages: int) -> KVCache:
        pools, self.pools = self.pools, None
        assert pools is not None
        if pools.num_device_blocks == num_pages:
            return pools
        del pools  # or both would have to fit
        gc.collect()
        if self.device.torch_device.type == "cuda":
            torch.cuda.empty_cache()
        return self.device.new_kv_cache(self.loaded.own_geometry, self.config, 0, None, num_pages)


def build_first_on_gpus(config: ExecutorConfig, device: Device, leader: Leader) -> tuple[GpuStepExecutor, Description]:
    """Build the executor of rank 0, while the others build theirs. Raises StartError."""
    try:
        loaded = load_model(config, device, adapter_sizes(config, device), leader.join)
        part = _RankPart(config, device, loaded, leader.make_adapters(loaded))
        check_kernels(config, device, loaded, None)
        held = leader.agree(loaded, part.make_pools(), part.adapters)
        executor, pools = part.executor(held)
        executor.ranks.join(leader.begin(loaded))
    except BaseException:
        leader.stop()
        raise
    loaded = held.of_all(loaded)
    prints = fingerprint(loaded, device, pools)
    limits = executor.limits
    _log.info(
        "model %s: %s on %d GPUs, %s, KV blocks of %d tokens: %d on the device, %d on the host",
        loaded.geometry.name, loaded.geometry.architecture, config.tensor_parallel_size, loaded.geometry.dtype,
        limits.block_size, limits.num_device_blocks, limits.num_host_blocks,
    )  # fmt: skip
    described = describe(
        loaded,
        limits,
        pools,
        prints,
        device.name,
        shares_prefixes=loaded.shares_prefixes,
        default_sampling=sampling_defaults(config),
    )
    return executor, replace(described, bytes_per_block=held.bytes_per_block)


def build_member_on_gpus(config: ExecutorConfig, device: Device, joined: Joined) -> tuple[GpuStepExecutor, MemberRanks]:
    """Build the executor of a rank other than 0. Raises StartError."""

    def join(spec: DecoderSpec) -> RankKernels:
        check_split(spec, config.tensor_parallel_size)
        return make_ranks(device, joined.rank, config, spec, joined.exchanges, joined.meet)

    try:
        loaded = load_model(config, device, adapter_sizes(config, device), join)
        part = _RankPart(config, device, loaded, make_adapters(config, device, loaded, joined.on_host))
        check_kernels(config, device, loaded, None)
        held = held_by(loaded, part.make_pools(), part.adapters, device)
        joined.link.send(Frame.HELD, json.dumps(held).encode())
        executor, _ = part.executor(read_held(json.loads(joined.expect(Frame.SIZES))))
    except StartError as error:
        # Rank 0 may be in an operation that waits for this one, and would read no reason.
        report_error(f"rank {joined.rank}: {error}", "executor_svc")
        raise
    assert loaded.ranks is not None
    ranks = MemberRanks(loaded.ranks, joined.link)
    executor.ranks.join(ranks)
    return executor, ranks
