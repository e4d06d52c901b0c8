"""Chooses the device, makes the executor of a loaded model, and runs its largest steps on trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.runner import ModelRunner
from executor_svc.device.interface import Device, DeviceError, is_interpreted, is_out_of_memory
from executor_svc.device.kv_cache import KVCache
from executor_svc.models.decoder import Decoder
from executor_svc.models.heads.head import DraftHead
from executor_svc.models.loading import LoadedModel
from executor_svc.plan.description import limits_of
from executor_svc.plan.limits import Limits
from executor_svc.simulated.injection import InjectionError, read_injection
from executor_svc.speculation.drafts import DraftSource
from executor_svc.startup.injected import InjectedStepExecutor
from executor_svc.startup.speculation import Draft, model_on_gpu
from executor_svc.structured.slot_grammars import SlotGrammars
from executor_svc.worker.eager_runner import EagerRunner
from executor_svc.worker.model_adapters import ModelAdapterLoader
from executor_svc.worker.step import Runner, StepExecutor
from executor_svc.worker.worker import Executor


def make_device(config: ExecutorConfig) -> Device:
    """Return the device of the options; `auto`: a GPU if there is one, else the CPU.

    Loading a model sets its dtype. Raises DeviceError for a device, dtype or instruction set that is not available.
    """
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if on_gpu and config.cpu_isa != "auto":
        raise DeviceError(f"--cpu-isa {config.cpu_isa} is not possible on a GPU: it needs --device cpu")
    if on_gpu and not (torch.cuda.is_available() or is_interpreted()):
        raise DeviceError("--device cuda: PyTorch sees no GPU here; use --device cpu")
    # Imported here: each device has libraries of its own.
    if on_gpu:
        try:
            from executor_svc.gpu.device import GpuDevice
        except ImportError as error:
            raise DeviceError(f"--device cuda: {error}; PyTorch for CUDA brings Triton with it") from error
        return GpuDevice(config)
    from executor_svc.cpu.device import CpuDevice

    return CpuDevice(config)


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
    draft_model: Decoder | DraftHead | None = None,
    adapters: ModelAdapterLoader | None = None,
    grammars: SlotGrammars | None = None,
) -> Executor:
    """Return the executor of a model, for use by one thread.

    enforce_eager: without CUDA graphs. inject: faults for tests, on the CPU only; raises InjectionError. drafts:
    returns the source of drafts for the model's runner, which keeps the states of state_layers; on a GPU there is none,
    and no source that needs one. draft_model: a model or head that makes drafts on a GPU, in place of a source; its
    layers are in `pools`. adapters: those of the model. grammars: those of the slots.
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
            adapters=adapters, grammars=grammars,
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
    """Run the largest steps on a GPU, with an executor of the same options but a cache of one block and
    recurrent state.

    draft: runs in the same steps.

    Raises DeviceError, naming the options, if they do not fit into the GPU's memory.
    """
    from executor_svc.gpu.warm_up import run_largest_steps

    config = config.model_copy(update={"num_gpu_blocks": 1, "num_cpu_blocks": 0})
    one_state = config.model_copy(update={"max_num_seqs": 1})
    try:
        pools = device.new_kv_cache(loaded.own_geometry, one_state, 0, None if draft is None else draft.layers)
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
