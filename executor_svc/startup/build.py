"""Builds the executor of a model: device, weights, KV pools."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial

import torch

from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import KVCache
from executor_svc.models.loading import LoadedModel, load_model
from executor_svc.models.sampling_defaults import sampling_defaults
from executor_svc.plan.description import Description, ModelGeometry, describe, limits_of
from executor_svc.plan.limits import Limits
from executor_svc.ranks.hosts.places import RankPlace
from executor_svc.speculation.drafts import DraftSource
from executor_svc.startup.adapters import adapter_sizes, held_on_cpu, make_adapters, with_adapters
from executor_svc.startup.executors import make_device, make_executor, run_trial
from executor_svc.startup.fingerprint import fingerprint
from executor_svc.startup.gpu_report import StartReport, check_kernels
from executor_svc.startup.grammars import find_grammars, with_grammars
from executor_svc.startup.speculation import (
    Draft,
    check_speculation,
    load_speculative_model,
    make_draft_source,
    model_on_gpu,
    state_layers_of,
    with_drafts_of,
    without_passes,
)
from executor_svc.worker.model_adapters import ModelAdapterLoader
from executor_svc.worker.worker import Executor

_log = logging.getLogger(__name__)


def build_model(
    config: ExecutorConfig, drafts: DraftSource | None = None, place: RankPlace | None = None
) -> tuple[Executor, Description]:
    """Load the model and build its executor. drafts: in place of the source of the options. place: of rank 0 among
    ranks that something else has started.

    Raises LoaderError or DeviceError with a message for the user.
    """
    if config.tensor_parallel_size > 1:
        from executor_svc.startup.ranks import build_divided

        return build_divided(config, drafts, place)
    began = time.monotonic()
    device = make_device(config)
    config = config.sized_for(device.name)
    check_speculation(config, device.name)
    torch.set_num_threads(device.num_threads)
    report = StartReport(device)
    config, loaded, draft, adapters = _load(config, device, report)
    with report.part("largest steps"):
        step_bytes = _step_bytes(config, device, loaded, draft, adapters)
    pools = device.new_kv_cache(loaded.geometry, config, step_bytes, None if draft is None else draft.layers)
    report.takes("KV blocks", pools.num_device_blocks * pools.bytes_per_block)
    found = find_grammars(loaded)
    engine = None if found is None else found.engine
    prints = fingerprint(loaded, device, pools, engine)
    limits = with_adapters(limits_of(config, loaded.geometry, pools), adapters)
    limits = limits if found is None else found.within(limits)
    grammars = None if found is None else found.of_slots(limits, device.name)
    _log_device(device, prints.mode, limits, pools)
    _log.info("loaded in %.1f s; fingerprint %s", time.monotonic() - began, prints.digest.hex()[:16])
    with report.part("graphs and steps of each kind"):
        executor = make_executor(
            loaded,
            device,
            pools,
            limits,
            enforce_eager=config.enforce_eager,
            inject=config.inject,
            state_layers=state_layers_of(draft),
            drafts=lambda runner: (
                drafts
                or with_grammars(
                    make_draft_source(config, limits, draft, device, pools, runner),
                    grammars,
                    on_device=device.name != "cpu" and loaded.recordable,
                )
            ),
            draft_model=model_on_gpu(draft, device),
            adapters=adapters,
            grammars=grammars,
        )
        _warm_up(executor, device)
    report.ends(config, step_bytes)
    described = describe(
        loaded, limits, pools, prints, device.name,
        shares_prefixes=loaded.shares_prefixes, grammar=engine, default_sampling=sampling_defaults(config),
    )  # fmt: skip
    return executor, replace(described, memory=tuple(report.memory))


def _load(
    config: ExecutorConfig, device: Device, report: StartReport
) -> tuple[ExecutorConfig, LoadedModel, Draft | None, ModelAdapterLoader | None]:
    """Load all that has weights, and compare the kernels that compute with them; settles the options."""
    with report.part("loading"):
        loaded = load_model(config, device, adapter_sizes(config, device))
        _log_model(loaded.geometry)
        report.takes("weights", loaded.geometry.weight_bytes)
        config = with_drafts_of(config, loaded.geometry)
        draft = load_speculative_model(config, device, loaded)
        adapters = make_adapters(config, device, loaded)
        report.takes("drafts and adapters", 0)
    with report.part("comparing kernels"):
        compared = check_kernels(config, device, loaded, draft)
        if not compared.for_graphs:
            config = config.model_copy(update={"enforce_eager": True})
        if not compared.has_passes:
            config, draft = without_passes(config), None
    return config, loaded, draft, adapters


def _warm_up(executor: Executor, device: Device) -> None:
    if device.torch_device.type == "cuda":
        from executor_svc.gpu.warm_up import run_steps

        run_steps(executor)


def _step_bytes(
    config: ExecutorConfig,
    device: Device,
    loaded: LoadedModel,
    draft: Draft | None,
    adapters: ModelAdapterLoader | None,
) -> int:
    """Return the bytes that steps need on the device, in addition to weights and KV blocks: on a GPU by a trial."""
    if device.torch_device.type != "cuda":
        return held_on_cpu(adapters, device)
    from executor_svc.gpu.device import BYTES_FOR_GRAPHS
    from executor_svc.gpu.measuring import peak_bytes_of

    step_bytes = peak_bytes_of(partial(run_trial, loaded, device, config, draft), device.torch_device)
    if adapters is not None:
        step_bytes += BYTES_FOR_GRAPHS  # of steps with adapters, beside the others
    _log.info("steps need %d bytes on the device, in addition to weights and KV blocks", step_bytes)
    return step_bytes


def _log_model(geometry: ModelGeometry) -> None:
    _log.info(
        "model %s: %s, %d parameters, %s, %d bytes, vocabulary %d, max_model_len %d",
        geometry.name, geometry.architecture, geometry.num_parameters, geometry.dtype, geometry.weight_bytes,
        geometry.vocab_size, geometry.max_model_len,
    )  # fmt: skip


def _log_device(device: Device, numerics: str, limits: Limits, pools: KVCache) -> None:
    _log.info(
        "device %s: %d threads, numerics %s, KV blocks of %d tokens: %d on the device, %d on the host, %d bytes each",
        device.name, device.num_threads, numerics, limits.block_size, limits.num_device_blocks,
        limits.num_host_blocks, pools.bytes_per_block,
    )  # fmt: skip
