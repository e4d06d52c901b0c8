"""Builds the executor of a model: device, weights, KV pools."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.runner import ModelRunner
from executor_svc.device.interface import Device, DeviceError
from executor_svc.device.kv_cache import KVCache
from executor_svc.models.decoder import Decoder
from executor_svc.models.loading import LoadedModel, load_model
from executor_svc.plan.description import Description, describe, limits_of
from executor_svc.plan.plan import Limits
from executor_svc.simulated.injection import InjectionError, read_injection
from executor_svc.speculation.drafts import DraftSource
from executor_svc.startup.adapters import adapter_sizes, held_on_cpu, make_adapters, with_adapters
from executor_svc.startup.device import make_device
from executor_svc.startup.fingerprint import fingerprint
from executor_svc.startup.grammars import find_grammars_of, with_grammars
from executor_svc.startup.injected import InjectedStepExecutor
from executor_svc.startup.speculation import (
    Draft,
    check_speculation,
    load_speculative_model,
    make_draft_source,
    model_on_gpu,
    state_layers_of,
)
from executor_svc.structured.slot_grammars import SlotGrammars
from executor_svc.worker.device_errors import is_out_of_memory
from executor_svc.worker.eager_runner import EagerRunner
from executor_svc.worker.model_adapters import ModelAdapterLoader
from executor_svc.worker.step import Runner, StepExecutor
from executor_svc.worker.worker import Executor

_log = logging.getLogger(__name__)


def make_executor(
    loaded: LoadedModel,
    device: Device,
    pools: KVCache,
    limits: Limits,
    *,
    enforce_eager: bool = False,
    inject: str | None = None,
    state_layers: Sequence[int] = (),
    drafts: Callable[[Runner | None], DraftSource | None] = lambda _: None,
    draft_model: Decoder | None = None,
    adapters: ModelAdapterLoader | None = None,
    grammars: SlotGrammars | None = None,
) -> Executor:
    """Return the executor of a model, for use by one thread.

    enforce_eager: without CUDA graphs. inject: faults for tests, on the CPU only; raises InjectionError. drafts:
    returns the source of drafts for the model's runner, which keeps the states of state_layers; on a GPU there is none,
    and no source that needs one. draft_model: on a GPU, makes drafts in place of a source; its layers are in `pools`.
    adapters: those of the model. grammars: those of the slots; on a GPU there are none.
    """
    if inject is not None:
        if device.name != "cpu":
            raise InjectionError(f"--inject {inject}: only with --simulate, or with a model on the CPU")
        runner = make_runner(loaded, device, pools, limits, state_layers)
        return InjectedStepExecutor(runner, pools, limits, read_injection(inject), drafts(runner), adapters, grammars)
    if device.name != "cpu" and loaded.recordable:
        from executor_svc.gpu.step import GpuStepExecutor

        return GpuStepExecutor(
            loaded, device, pools, limits, enforce_eager=enforce_eager, drafts=drafts(None), draft_model=draft_model,
            adapters=adapters,
        )  # fmt: skip
    on_gpu = device.torch_device.type == "cuda"
    runner = make_runner(loaded, device, pools, limits, state_layers)
    return StepExecutor(runner, pools, limits, on_gpu, drafts(runner), adapters, grammars=grammars)


def make_runner(
    loaded: LoadedModel, device: Device, pools: KVCache, limits: Limits, state_layers: Sequence[int]
) -> Runner:
    """Return what runs a model on the CPU, or one whose operations cannot be recorded: that has no state_layers."""
    if loaded.recordable:
        return ModelRunner(loaded.model, device, pools, limits, state_layers=state_layers, adapters=loaded.adapters)
    return EagerRunner(loaded, device, pools, limits)


def run_trial(loaded: LoadedModel, device: Device, config: ExecutorConfig, draft: Draft | None = None) -> None:
    """Run the largest steps on a GPU, with an executor of the same options but a cache of one block.

    draft: runs in the same steps.

    Raises DeviceError, naming the options, if they do not fit into the GPU's memory.
    """
    from executor_svc.gpu.warm_up import run_largest_steps

    config = config.model_copy(update={"num_gpu_blocks": 1, "num_cpu_blocks": 0})
    try:
        pools = device.new_kv_cache(loaded.geometry, config, 0, None if draft is None else draft.layers)
        limits = limits_of(config, loaded.geometry, pools)
        model = model_on_gpu(draft, device)
        run_largest_steps(make_executor(loaded, device, pools, limits, enforce_eager=True, draft_model=model))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceError(
            f"steps of --max-num-batched-tokens {config.max_num_batched_tokens} and --max-num-seqs "
            f"{config.max_num_seqs} do not fit into the GPU's memory together with the weights: {error}"
        ) from error


def build_model(config: ExecutorConfig, drafts: DraftSource | None = None) -> tuple[Executor, Description]:
    """Load the model and build its executor. drafts: in place of the source of the options.

    Raises LoaderError or DeviceError with a message for the user.
    """
    if config.tensor_parallel_size > 1:
        from executor_svc.startup.ranks import build_divided

        return build_divided(config, drafts)
    began = time.monotonic()
    device = make_device(config)
    check_speculation(config, device.name)
    config = config.sized_for(device.name)
    torch.set_num_threads(device.num_threads)
    loaded = load_model(config, device, adapter_sizes(config, device))
    geometry = loaded.geometry
    _log.info(
        "model %s: %s, %d parameters, %s, %d bytes, vocabulary %d, max_model_len %d",
        geometry.name, geometry.architecture, geometry.num_parameters, geometry.dtype, geometry.weight_bytes,
        geometry.vocab_size, geometry.max_model_len,
    )  # fmt: skip
    draft = load_speculative_model(config, device, loaded)
    adapters = make_adapters(config, device, loaded)
    on_gpu, step_bytes = device.torch_device.type == "cuda", held_on_cpu(adapters, device)
    if on_gpu:
        from executor_svc.gpu.device import BYTES_FOR_GRAPHS
        from executor_svc.gpu.memory import peak_bytes_of

        step_bytes = peak_bytes_of(partial(run_trial, loaded, device, config, draft), device.torch_device)
        if adapters is not None:
            step_bytes += BYTES_FOR_GRAPHS  # of steps with adapters, beside the others
        _log.info("steps need %d bytes on the device, in addition to weights and KV blocks", step_bytes)
    pools = device.new_kv_cache(geometry, config, step_bytes, None if draft is None else draft.layers)
    found = find_grammars_of(loaded, device.name)
    prints = fingerprint(loaded, device, pools, None if found is None else found.engine)
    limits = with_adapters(limits_of(config, geometry, pools), adapters)
    limits = limits if found is None else found.within(limits)
    grammars = None if found is None else found.of_slots(limits)
    _log.info(
        "device %s: %d threads, numerics %s, KV blocks of %d tokens: %d on the device, %d on the host, %d bytes each",
        device.name, device.num_threads, prints.mode, limits.block_size, limits.num_device_blocks,
        limits.num_host_blocks, pools.bytes_per_block,
    )  # fmt: skip
    _log.info("loaded in %.1f s; fingerprint %s", time.monotonic() - began, prints.digest.hex()[:16])
    executor = make_executor(
        loaded,
        device,
        pools,
        limits,
        enforce_eager=config.enforce_eager,
        inject=config.inject,
        state_layers=state_layers_of(draft),
        drafts=lambda runner: (
            drafts or with_grammars(make_draft_source(config, limits, draft, device, pools, runner), grammars)
        ),
        draft_model=model_on_gpu(draft, device),
        adapters=adapters,
        grammars=grammars,
    )
    if on_gpu:
        from executor_svc.gpu.warm_up import run_steps

        run_steps(executor)
    description = describe(
        loaded,
        limits,
        pools,
        prints,
        device.name,
        shares_prefixes=loaded.shares_prefixes,
        grammar=None if found is None else found.engine,
    )
    return executor, description
