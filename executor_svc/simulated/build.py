"""Builds the simulated executor from options."""

from __future__ import annotations

import logging
from dataclasses import replace

from executor_svc.config import ExecutorConfig
from executor_svc.errors import StartError
from executor_svc.models.sampling_defaults import sampling_defaults
from executor_svc.plan.description import Description, describe, limits_of
from executor_svc.plan.limits import GroupShape
from executor_svc.simulated.adapters import SimulatedAdapters
from executor_svc.simulated.clock import sharpen_sleep
from executor_svc.simulated.costs import read_costs
from executor_svc.simulated.drafts import AcceptanceSource
from executor_svc.simulated.executor import SimulatedStepExecutor
from executor_svc.simulated.group_options import most_pages, read_groups
from executor_svc.simulated.injection import read_injection, split_poison
from executor_svc.simulated.memory import PoolSizes
from executor_svc.simulated.model import fingerprint, simulated_model
from executor_svc.speculation.drafts import DraftSource

_log = logging.getLogger(__name__)


def build_simulated(
    config: ExecutorConfig, drafts: DraftSource | None = None
) -> tuple[SimulatedStepExecutor, Description]:
    """Build the executor, on the thread that will run it; raises StartError with a message for the user.

    drafts: in place of the source of the options.
    """
    config = config.sized_for("simulated")
    costs = read_costs(config.simulate or "instant")
    poison, others = split_poison(config.inject)
    injection = read_injection(others) if others is not None else None
    model = simulated_model(config)
    geometry = model.geometry
    groups = read_groups(config.simulate_kv_groups) if config.simulate_kv_groups else ()
    sizes = _pool_sizes(config, geometry.max_model_len, groups)
    limits = replace(
        limits_of(config, geometry, sizes),
        max_loras=config.max_loras,
        max_cpu_loras=config.max_cpu_loras,
        kv_groups=groups,
        pages_per_state=config.simulate_state_pages,
    )
    adapters = SimulatedAdapters(limits.max_cpu_loras, costs, roots=config.adapter_roots)
    try:
        if drafts is None and config.speculative != "off":
            drafts = AcceptanceSource(geometry.vocab_size, costs.draft_acceptance, adapters.hash_of)
        executor = SimulatedStepExecutor(
            limits, costs, injection=injection, poison=poison, drafts=drafts, adapters=adapters
        )
    except MemoryError as error:
        raise StartError(
            f"--num-gpu-blocks {sizes.num_device_blocks} and --num-cpu-blocks {sizes.num_host_blocks} need "
            f"{sizes.num_bytes} bytes even in simulation, more than is free"
        ) from error
    sharpen_sleep()
    _log.info(
        "simulated model %s: vocabulary %d, max_model_len %d, %s; KV blocks of %d tokens: %d on the device, %d on the "
        "host", geometry.name, geometry.vocab_size, geometry.max_model_len,
        "steps take no time" if costs.instant else f"costs {costs!r}",
        limits.block_size, limits.num_device_blocks, limits.num_host_blocks,
    )  # fmt: skip
    prints = fingerprint(geometry.vocab_size, fast=config.numerics == "fast")
    return executor, describe(
        model, limits, sizes, prints, "simulated", shares_prefixes=True, default_sampling=sampling_defaults(config)
    )


def _pool_sizes(config: ExecutorConfig, max_model_len: int, groups: tuple[GroupShape, ...]) -> PoolSizes:
    """Return the pool sizes of the options; default: the most device pages that the sequences of a step could use."""
    most = -(-max_model_len // config.block_size)
    if groups:
        most = most_pages(groups, most, config.block_size, config.max_num_batched_tokens)
    most += config.simulate_state_pages
    options = config.num_gpu_blocks or config.max_num_seqs * most, config.num_cpu_blocks
    return PoolSizes(config.block_size, *(config.pool_pages or options))
