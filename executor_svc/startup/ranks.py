"""A model that is divided among ranks: builds the executor of each."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.runner import ModelRunner
from executor_svc.device.ranks import RankKernels
from executor_svc.models.loading import load_model
from executor_svc.models.parallel.split import check_split
from executor_svc.models.sampling_defaults import sampling_defaults
from executor_svc.models.specs.spec import DecoderSpec
from executor_svc.plan.description import Description, describe, limits_of
from executor_svc.ranks.drafts import LeaderDrafts, MemberDrafts
from executor_svc.ranks.hosts.places import RankPlace
from executor_svc.ranks.links import Frame
from executor_svc.ranks.members import Joined
from executor_svc.ranks.steps import MemberRanks
from executor_svc.speculation.drafts import DraftSource
from executor_svc.startup.adapters import adapter_sizes, make_adapters, with_adapters
from executor_svc.startup.executors import make_device
from executor_svc.startup.fingerprint import fingerprint
from executor_svc.startup.gpu_ranks import build_first_on_gpus, build_member_on_gpus
from executor_svc.startup.grammars import find_grammars, with_grammars
from executor_svc.startup.held import fewest_blocks, held_by, layers_beside, limit_adapters, new_pools, read_held
from executor_svc.startup.leader import Leader
from executor_svc.startup.rank_checks import RanksError, ranks_on_host, threads_of
from executor_svc.startup.rank_kernels import make_ranks
from executor_svc.startup.speculation import (
    check_speculation,
    load_speculative_model,
    make_draft_source,
    state_layers_of,
    with_drafts_of,
)
from executor_svc.worker.step import StepExecutor
from executor_svc.worker.worker import Executor

if TYPE_CHECKING:
    from executor_svc.gpu.step import GpuStepExecutor

_log = logging.getLogger(__name__)


def build_divided(
    config: ExecutorConfig, drafts: DraftSource | None = None, place: RankPlace | None = None
) -> tuple[Executor, Description]:
    """Build the executor of rank 0, and start the others; arguments and errors as those of `build.build_model`."""
    config = threads_of(config, place)
    device = make_device(config)
    check_speculation(config.sized_for(device.name), device.name)
    torch.set_num_threads(device.num_threads)
    if device.name != "cpu" and drafts is not None:
        raise RanksError("drafts that are given, as those of a replay, are not possible with ranks on GPUs so far")
    leader = Leader(config, device, place)
    config = config.sized_for(device.name)
    if device.name != "cpu":
        return build_first_on_gpus(config, device, leader)
    try:
        loaded = load_model(config, device, adapter_sizes(config, device), leader.join)
        config = with_drafts_of(config, loaded.geometry)
        adapters = leader.make_adapters(loaded)
        draft = load_speculative_model(config, device, loaded)
        layers = None if draft is None else draft.layers
        leader.send_draft_layers(layers)
        pools = new_pools(loaded, device, config, adapters, ranks_on_host(config, place), layers)
        held = leader.agree(loaded, pools, adapters)
        pools = fewest_blocks(pools, held, loaded, device, config, layers)
        limit_adapters(adapters, held)
        ranks = leader.begin(loaded)
    except BaseException:
        leader.stop()
        raise
    limits = with_adapters(limits_of(config, loaded.geometry, pools), adapters)
    found = find_grammars(loaded)
    engine = None if found is None else found.engine
    limits = limits if found is None else found.within(limits)
    grammars = None if found is None else found.of_slots(limits)
    states = state_layers_of(draft)
    runner = ModelRunner(loaded.model, device, pools, limits, state_layers=states, adapters=loaded.adapters)
    source = drafts or with_grammars(make_draft_source(config, limits, draft, device, pools, runner), grammars)
    shared = None if source is None else LeaderDrafts(source, ranks)
    executor = StepExecutor(runner, pools, limits, drafts=shared, adapters=adapters, ranks=ranks, grammars=grammars)
    loaded = held.of_all(loaded)
    prints = fingerprint(loaded, device, pools, engine)
    _log.info(
        "model %s: %s in %d ranks of %d threads, %s, KV blocks of %d tokens: %d on the device, %d on the host",
        loaded.geometry.name, loaded.geometry.architecture, config.tensor_parallel_size, device.num_threads,
        loaded.geometry.dtype, limits.block_size, limits.num_device_blocks, limits.num_host_blocks,
    )  # fmt: skip
    described = describe(
        loaded,
        limits,
        pools,
        prints,
        device.name,
        shares_prefixes=loaded.shares_prefixes,
        grammar=engine,
        default_sampling=sampling_defaults(config),
    )
    return executor, replace(described, bytes_per_block=held.bytes_per_block)


def build_member(config: ExecutorConfig, joined: Joined) -> tuple[StepExecutor | GpuStepExecutor, MemberRanks]:
    """Build the executor of a rank other than 0, with its number of threads. Raises StartError."""
    device = make_device(config)
    config = config.sized_for(device.name)
    torch.set_num_threads(device.num_threads)
    if device.name != "cpu":
        return build_member_on_gpus(config, device, joined)

    def join(spec: DecoderSpec) -> RankKernels:
        check_split(spec, config.tensor_parallel_size)
        return make_ranks(device, joined.rank, config, spec, joined.exchanges, joined.meet)

    loaded = load_model(config, device, adapter_sizes(config, device), join)
    config = with_drafts_of(config, loaded.geometry)
    adapters = make_adapters(config, device, loaded, joined.on_host)
    layers = layers_beside(loaded, joined.expect(Frame.LAYERS))
    pools = new_pools(loaded, device, config, adapters, joined.on_host, layers)
    joined.link.send(Frame.HELD, json.dumps(held_by(loaded, pools, adapters, device)).encode())
    held = read_held(json.loads(joined.expect(Frame.SIZES)))
    pools = fewest_blocks(pools, held, loaded, device, config, layers)
    limit_adapters(adapters, held)
    # Rank 0 has the masks, and says whether plans may have grammars.
    limits = replace(with_adapters(limits_of(config, loaded.geometry, pools), adapters), has_grammars=True)
    assert loaded.ranks is not None
    ranks = MemberRanks(loaded.ranks, joined.link)
    runner = ModelRunner(loaded.model, device, pools, limits, adapters=loaded.adapters)
    drafts = None if config.speculative == "off" else MemberDrafts(ranks)
    return StepExecutor(runner, pools, limits, drafts=drafts, adapters=adapters, ranks=ranks), ranks
