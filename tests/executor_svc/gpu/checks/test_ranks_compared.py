"""A rank compares its own part of a model, and what it makes of all ranks' rows, without another rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from executor_svc.config import ExecutorConfig
from executor_svc.device.ranks import Share
from executor_svc.gpu.checks.fallbacks import Fallbacks
from executor_svc.gpu.checks.model_check import ModelCheck, compare_models
from executor_svc.gpu.checks.steps import ranks as checked_ranks
from executor_svc.gpu.checks.steps import step_check as checking
from executor_svc.gpu.checks.steps.step_check import StepCheck
from executor_svc.gpu.choices.ways import KernelChecks, KernelError
from executor_svc.gpu.kernels import norm
from executor_svc.gpu.kernels.attention import plan as attention_plan
from executor_svc.gpu.kernels.sampling import penalties
from executor_svc.gpu.ranks import GpuRanks
from executor_svc.gpu.states import GpuStateKernels
from executor_svc.models.loading import load_model
from executor_svc.startup.executors import make_device
from tests.checkpoints import make_checkpoint
from tests.executor_svc.gpu.checks.checked import refused, scaled
from tests.helpers.marks import short_and_long

RANKS = 2


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a vocabulary that two ranks do not divide evenly, with biases that are added to sums."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", vocab_size=131, **sizes, **heads)


def rank_check(folder: Path, rank: int) -> tuple[ModelCheck, StepCheck]:
    options = {"model": str(folder), "device": "cuda", "dtype": "bfloat16", "tensor_parallel_size": RANKS}
    config = ExecutorConfig(**options, num_threads=1)
    device = make_device(config)
    kernels = device.kernels
    assert isinstance(kernels, GpuStateKernels)
    loaded = load_model(config, device, None, lambda _: GpuRanks(Share(rank, RANKS), kernels))
    checks = KernelChecks(device.torch_device)
    return ModelCheck(loaded, device, config, checks, long=40), StepCheck(loaded, device, config, checks)


@pytest.mark.parametrize("rank", short_and_long(range(RANKS), [1]))
def test_each_rank_agrees_alone(rank: int, divided: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "kinds_of_step", lambda _: ())  # what is chosen has tests of its own
    assert not dist.is_initialized()
    model, steps = rank_check(divided, rank)
    assert compare_models([model], steps).reasons == {}
    assert model.checks.num_compared > 40


@pytest.mark.long
def test_what_is_off_falls_back_on_its_rank(divided: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "rms_norm", scaled(norm.rms_norm, 3))
    model, _ = rank_check(divided, 1)
    assert set(compare_models([model]).ways.values()) == {"torch"}


def test_what_all_ranks_would_have_to_know_of_refuses_the_start(divided: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by PyTorch is in no graphs, and steps whose draws are the host's wait for earlier ones."""
    model, steps = rank_check(divided, 0)
    with monkeypatch.context() as patch:
        patch.setattr(attention_plan, "attention", refused)
        with pytest.raises(KernelError, match=r"^attention .*: kernel RuntimeError.*, tiles of 86 RuntimeError[^,]*$"):
            compare_models([model])
    with monkeypatch.context() as patch:
        patch.setattr(penalties, "_clear", refused)
        with pytest.raises(KernelError, match=r"^sampling/penalties \(vocabulary 131\): .*: kernel TypeError"):
            compare_models([rank_check(divided, 0)[0]], steps)


def test_sums_of_all_ranks_are_compared(divided: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_ranks, "sum_parts", lambda parts, bias, out: out.copy_(parts[0]))
    _, steps = rank_check(divided, 0)
    kernels = steps.device.kernels
    assert isinstance(kernels, GpuStateKernels)
    with pytest.raises(KernelError, match=r"^rank_rows \(2 ranks, x 64 bfloat16\): .* kernel one number is off"):
        steps.run(Fallbacks(kernels, steps.checks, divided=True))
