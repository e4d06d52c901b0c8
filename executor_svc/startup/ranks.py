"""A model that is divided among ranks: starts their processes, and builds the executor of each."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cadenza.telemetry.logs import report_error
from executor_svc.config import ExecutorConfig
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.ranks.launches import CpuRanks
from executor_svc.cpu.kernels.ranks.memory import ExchangeMemory, ExchangeSizes
from executor_svc.cpu.runner import ModelRunner
from executor_svc.device.interface import Device, cores
from executor_svc.device.kv_cache import DraftLayers, KVCache
from executor_svc.device.ranks import RankKernels, Share
from executor_svc.errors import StartError
from executor_svc.models.loading import LoadedModel, load_model
from executor_svc.models.parallel.split import check_split
from executor_svc.models.spec import DecoderSpec
from executor_svc.plan.description import Description, describe, limits_of
from executor_svc.ranks.adapters import LeaderAdapters
from executor_svc.ranks.drafts import LeaderDrafts, MemberDrafts
from executor_svc.ranks.links import Frame, Link
from executor_svc.ranks.processes import RankProcesses, map_memory
from executor_svc.ranks.steps import LeaderRanks, MemberRanks
from executor_svc.speculation.drafts import DraftSource
from executor_svc.startup.adapters import adapter_sizes, held_on_cpu, make_adapters, max_loaded, with_adapters
from executor_svc.startup.device import make_device
from executor_svc.startup.fingerprint import fingerprint
from executor_svc.startup.grammars import find_grammars, with_grammars
from executor_svc.startup.speculation import check_speculation, load_speculative_model, make_draft_source
from executor_svc.worker.model_adapters import ModelAdapterLoader
from executor_svc.worker.step import StepExecutor
from executor_svc.worker.worker import Executor

_log = logging.getLogger(__name__)
EXIT_RANK = 5


class RanksError(StartError):
    """The options of ranks contradict others, or the machine; the message names them."""


@dataclass(frozen=True, slots=True)
class Held:
    """What all ranks hold."""

    num_device_blocks: int
    num_host_blocks: int
    bytes_per_block: int
    """Of all ranks together."""
    weights_digest: bytes
    max_loaded: int
    """Adapters at most."""


class Leader:
    """Rank 0's side of the start."""

    def __init__(self, config: ExecutorConfig, device: Device) -> None:
        """Start the processes of the others, which load while this one does. Raises RanksError."""
        check_ranks(config, device)
        self._config, self._device, self._size = config, device, config.tensor_parallel_size
        options = {**config.model_dump(exclude_unset=True, mode="json"), "num_threads": device.num_threads}
        self._processes = RankProcesses(self._size, options)

    def join(self, spec: DecoderSpec) -> RankKernels:
        """Implements `models.loading.Join`."""
        check_split(spec, self._size)
        sizes = _sizes(self._config, spec)
        return _ranks(self._device, 0, sizes, self._processes.open_memory(sizes.num_bytes))

    def agree(self, loaded: LoadedModel, pools: KVCache, adapters: ModelAdapterLoader | None) -> Held:
        """Return what all ranks hold: the fewest blocks, and one digest. Raises StartError."""
        return _held(self._processes.agree(_own(loaded, pools, adapters), _decide))

    def begin(self, loaded: LoadedModel) -> LeaderRanks:
        """Return rank 0's side of steps, once all ranks wait for plans; their ends end this process from now on."""
        kernels = loaded.ranks
        assert kernels is not None
        self._processes.wait_until_ready()
        self._processes.watch(lambda rank, how: _end(rank, how, kernels))
        return LeaderRanks(kernels, self._processes.links)

    def stop(self) -> None:
        """End the others: this process cannot start."""
        self._processes.stop()

    def make_adapters(self, loaded: LoadedModel) -> LeaderAdapters | None:
        """Return what loads the adapters of all ranks; None for a model without places for them."""
        if loaded.adapters is None:
            return None
        config, links = self._config, self._processes.adapter_links
        most = max_loaded(config, loaded.adapters, _own_memory(self._device, config))
        return LeaderAdapters(loaded.adapters, most, links, roots=config.adapter_roots, base_table=loaded.base_table)


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


def threads_of(config: ExecutorConfig) -> ExecutorConfig:
    """Return the options of one rank of this machine: its share of the cores, unless an option says how many."""
    threads = config.num_threads or max(1, cores() // config.tensor_parallel_size)
    return config.model_copy(update={"num_threads": threads})


def build_divided(config: ExecutorConfig, drafts: DraftSource | None = None) -> tuple[Executor, Description]:
    """Build the executor of rank 0, and start the others; arguments and errors as those of `build.build_model`."""
    device = make_device(threads_of(config))
    check_speculation(config, device.name)
    config = config.sized_for(device.name)
    torch.set_num_threads(device.num_threads)
    leader = Leader(config, device)
    try:
        loaded = load_model(config, device, adapter_sizes(config, device), leader.join)
        adapters = leader.make_adapters(loaded)
        draft = load_speculative_model(config, device, loaded)
        layers = None if draft is None else draft.layers
        pools = new_pools(loaded, device, config, adapters, layers)
        held = leader.agree(loaded, pools, adapters)
        pools = fewest_blocks(pools, held, loaded, device, config, layers)
        _limit(adapters, held)
        ranks = leader.begin(loaded)
    except BaseException:
        leader.stop()
        raise
    limits = with_adapters(limits_of(config, loaded.geometry, pools), adapters)
    found = find_grammars(loaded)
    engine = None if found is None else found.engine
    limits = limits if found is None else found.within(limits)
    grammars = None if found is None else found.of_slots(limits)
    runner = ModelRunner(loaded.model, device, pools, limits, adapters=loaded.adapters)
    source = drafts or with_grammars(make_draft_source(config, limits, draft, device, pools, runner), grammars)
    shared = None if source is None else LeaderDrafts(source, ranks)
    executor = StepExecutor(runner, pools, limits, drafts=shared, adapters=adapters, ranks=ranks, grammars=grammars)
    prints = fingerprint(replace(loaded, weights_digest=held.weights_digest), device, pools, engine)
    _log.info(
        "model %s: %s in %d ranks of %d threads, %s, KV blocks of %d tokens: %d on the device, %d on the host",
        loaded.geometry.name, loaded.geometry.architecture, config.tensor_parallel_size, device.num_threads,
        loaded.geometry.dtype, limits.block_size, limits.num_device_blocks, limits.num_host_blocks,
    )  # fmt: skip
    described = describe(
        loaded, limits, pools, prints, device.name, shares_prefixes=loaded.shares_prefixes, grammar=engine
    )
    return executor, replace(described, bytes_per_block=held.bytes_per_block)


def build_member(config: ExecutorConfig, rank: int, link: Link, memory: int) -> tuple[StepExecutor, MemberRanks]:
    """Build the executor of another rank than 0. Raises StartError."""
    device = make_device(config)
    config = config.sized_for(device.name)

    def join(spec: DecoderSpec) -> RankKernels:
        check_split(spec, config.tensor_parallel_size)
        kind, content = link.receive()
        assert kind == Frame.MEMORY
        return _ranks(device, rank, _sizes(config, spec), map_memory(memory, int(content)))

    loaded = load_model(config, device, adapter_sizes(config, device), join)
    adapters = make_adapters(config, device, loaded)
    pools = new_pools(loaded, device, config, adapters)
    link.send(Frame.HELD, json.dumps(_own(loaded, pools, adapters)).encode())
    kind, content = link.receive()
    assert kind == Frame.SIZES
    held = _held(json.loads(content))
    pools = fewest_blocks(pools, held, loaded, device, config)
    _limit(adapters, held)
    # Rank 0 has the masks, and says whether plans may have grammars.
    limits = replace(with_adapters(limits_of(config, loaded.geometry, pools), adapters), has_grammars=True)
    assert loaded.ranks is not None
    ranks = MemberRanks(loaded.ranks, link)
    runner = ModelRunner(loaded.model, device, pools, limits, adapters=loaded.adapters)
    drafts = None if config.speculative == "off" else MemberDrafts(ranks)
    return StepExecutor(runner, pools, limits, drafts=drafts, adapters=adapters, ranks=ranks), ranks


def new_pools(
    loaded: LoadedModel,
    device: Device,
    config: ExecutorConfig,
    adapters: ModelAdapterLoader | None,
    draft: DraftLayers | None = None,
) -> KVCache:
    """Return the pools of one rank: of its KV heads, in its share of this machine's free memory."""
    others = device.free_memory_bytes() - _own_memory(device, config)
    return device.new_kv_cache(loaded.own_geometry, config, others + held_on_cpu(adapters, device), draft)


def _own_memory(device: Device, config: ExecutorConfig) -> int:
    """Return a rank's share of the free memory of this machine."""
    return device.free_memory_bytes() // config.tensor_parallel_size


def fewest_blocks(
    pools: KVCache,
    held: Held,
    loaded: LoadedModel,
    device: Device,
    config: ExecutorConfig,
    draft: DraftLayers | None = None,
) -> KVCache:
    """Return the pools, or smaller ones if another rank has room for fewer blocks."""
    if pools.num_device_blocks == held.num_device_blocks:
        return pools
    config = config.model_copy(update={"num_gpu_blocks": held.num_device_blocks})
    return device.new_kv_cache(loaded.own_geometry, config, 0, draft)


def _sizes(config: ExecutorConfig, spec: DecoderSpec) -> ExchangeSizes:
    most = config.max_num_batched_tokens, spec.hidden_size, config.max_num_seqs, spec.vocab_size
    return ExchangeSizes(config.tensor_parallel_size, *most)


def _ranks(device: Device, rank: int, sizes: ExchangeSizes, memory: NDArray[np.uint8]) -> RankKernels:
    kernels = device.kernels
    assert isinstance(kernels, CpuKernels)
    return CpuRanks(Share(rank, sizes.num_ranks), kernels, ExchangeMemory(memory, sizes))


def _limit(adapters: ModelAdapterLoader | None, held: Held) -> None:
    if adapters is not None:
        adapters.max_loaded = held.max_loaded


def _own(loaded: LoadedModel, pools: KVCache, adapters: ModelAdapterLoader | None) -> dict[str, Any]:
    return {
        "device": pools.num_device_blocks,
        "host": pools.num_host_blocks,
        "bytes": pools.bytes_per_block,
        "weights": loaded.weights_digest.hex(),
        "adapters": 0 if adapters is None else adapters.max_loaded,
    }


def _decide(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    digests = b"".join(bytes.fromhex(each["weights"]) for each in ranks)
    return {
        "device": min(each["device"] for each in ranks),
        "host": min(each["host"] for each in ranks),
        "bytes": sum(each["bytes"] for each in ranks),
        "weights": hashlib.sha256(digests).hexdigest(),
        "adapters": min(each["adapters"] for each in ranks),
    }


def _held(decided: dict[str, Any]) -> Held:
    return Held(
        decided["device"], decided["host"], decided["bytes"], bytes.fromhex(decided["weights"]), decided["adapters"]
    )


def _end(rank: int, how: str, kernels: RankKernels) -> None:
    """End this process, and with it the others: a replica with a rank less computes nothing."""
    kernels.fail()
    report_error(f"rank {rank} ended: {how}; this executor ends", "executor_svc")
    sys.stderr.flush()
    os._exit(EXIT_RANK)
