"""Operations of adapters, draft heads and experts in few bits at the start: right ones agree, wrong ones are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.gpu import expert_linear
from executor_svc.gpu.checks.model_check import ModelCheck, compare_models
from executor_svc.gpu.choices.ways import KernelChecks, KernelError
from executor_svc.gpu.kernels import gpu_kernels, norm
from executor_svc.gpu.kernels.lora import adapter_places, tables
from executor_svc.models.adapters.places import AdapterSizes
from executor_svc.models.heads.draft import LoadedDraft
from executor_svc.models.heads.eagle3_loading import load_eagle3
from executor_svc.models.heads.head import DraftHead
from executor_svc.models.heads.mtp_loading import load_mtp
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.checks.checked import HEADS, loaded, model_check, scaled
from tests.helpers.marks import short_and_long
from tests.helpers.models.agreeing_heads import make_agreeing
from tests.helpers.models.mtp_heads import make_mimo
from tests.helpers.models.quantized_layouts import quantize_checkpoint

SIZES = AdapterSizes(num_places=2, max_rank=20)


def adapted(folder: Path, sizes: AdapterSizes = SIZES) -> Model:
    return loaded(folder, sizes, quantization="none")


def places_are_empty(model: Model) -> bool:
    assert model.loaded.adapters is not None
    linears = model.loaded.adapters._linears.values()
    return not any(bool(linear.places.products.ranks.any()) for linear in linears)  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_places", short_and_long([1, 2], [2]))
def test_adapters_agree_and_leave_their_places(num_places: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model_check(loaded(folder, quantization="none"))
    compare_models([plain])
    tried: list[str] = []
    compare = KernelChecks.tried

    def noted(checks: KernelChecks, name: str, *others: Any) -> Any:
        tried.append(name)
        return compare(checks, name, *others)

    monkeypatch.setattr(KernelChecks, "tried", noted)
    model = adapted(folder, AdapterSizes(num_places, max_rank=20))
    check = model_check(model)
    assert compare_models([check]).reasons == {}
    assert places_are_empty(model)
    own = [name for name in tried if name.startswith("add_")]
    # With one place there is no step of the other sequence alone.
    assert check.checks.num_compared == plain.checks.num_compared + 6 * (2 + num_places)
    assert {name.partition(" (")[0] for name in own} >= {"add_adapters", "add_embedding_adapters"}
    linears = {name for name in own if name.startswith("add_adapters")}
    assert len(linears) == 5, "q, k and v; o; gate and up; down; the head"


@pytest.mark.long
def test_adapters_beside_recurrent_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps with adapters begin anew in the pages of those without: what they read is finite."""
    shape = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "vocab_size": 131}
    folder = make_checkpoint(tmp_path, "qwen3_5_delta", dtype=torch.bfloat16, **shape)
    add, finite = gpu_kernels.GpuAdapterPlaces.add, list[bool]()

    def noted(places: Any, x: torch.Tensor, *others: Any) -> None:
        finite.append(bool(x.isfinite().all()))
        add(places, x, *others)

    monkeypatch.setattr(gpu_kernels.GpuAdapterPlaces, "add", noted)
    assert compare_models([model_check(adapted(folder))]).reasons == {}
    assert len(finite) > 30
    assert all(finite)


WRONG: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a product": (adapter_places, "add_lora", lambda launch: scaled(launch, 4)),
    "rows of the head": (adapter_places, "replace_logits", lambda launch: scaled(launch, 3)),
    "embeddings": (adapter_places, "add_embedding_lora", lambda launch: scaled(launch, 4)),
    "rows that are not replaced": (adapter_places, "replace_embeddings", lambda _: lambda *_: None),
    "a table of rows": (
        tables, "sort_rows", lambda launch: lambda places, index, table: launch(places.roll(1), index, table),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", short_and_long([*WRONG], ["a product", "a table of rows"]))
def test_wrong_kernels_of_adapters_are_refused(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, function, make = WRONG[name]
    model = adapted(folder)
    monkeypatch.setattr(owner, function, make(getattr(owner, function)))
    with pytest.raises(KernelError, match=r"^add_(embedding_)?adapters \(.*no way is right on this GPU: kernel .* off"):
        compare_models([model_check(model)])
    assert places_are_empty(model)


def with_eagle3(folder: Path) -> tuple[Model, LoadedDraft[DraftHead]]:
    target, head = make_agreeing(folder)
    model = Model(target, device="cuda")
    return model, load_eagle3(str(head), ExecutorConfig(**model.options), model.device, model.loaded)


def with_mtp(folder: Path) -> tuple[Model, LoadedDraft[DraftHead]]:
    model = Model(make_mimo(folder, num_hidden_layers=1), device="cuda")
    return model, load_mtp(ExecutorConfig(**model.options), model.device, model.loaded)


def compared(model: Model, draft: LoadedDraft[DraftHead]) -> tuple[KernelChecks, int]:
    """Return the checks of a target and its head, and how many of them are the target's."""
    config, checks = ExecutorConfig(**model.options), KernelChecks(model.device.torch_device)
    where = model.loaded, model.device, config, checks, draft.layers
    compare_models([ModelCheck(*where, long=20)])
    of_target = checks.num_compared
    compare_models([ModelCheck(*where, draft.model, long=20)])
    return checks, of_target


@pytest.mark.parametrize("make", short_and_long([with_eagle3, with_mtp], [with_eagle3]))
def test_heads_are_compared(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = make(tmp_path)
    checks, of_target = compared(model, draft)
    assert checks.fallen == []
    assert checks.num_compared > of_target + 25
    launch = gpu_kernels.rows.copy_columns
    monkeypatch.setattr(gpu_kernels.rows, "copy_columns", scaled(launch, 1))
    found, _ = compared(model, draft)
    assert found.fallen
    assert {line.partition(" ")[0] for line in found.fallen} == {"copy_columns"}, "which heads alone have here"


@pytest.mark.parametrize("layout", short_and_long(["gptq", "w4a16 with actorder"], ["gptq"]))
def test_experts_in_few_bits_are_compared(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, **HEADS}
    folder = make_checkpoint(tmp_path / "whole", "qwen3_moe", vocab_size=131, dtype=torch.bfloat16, **shape)
    quantize_checkpoint(folder, layout, tmp_path / "few bits", tmp_path / "dense")
    model = Model(tmp_path / "few bits", device="cuda", dtype="float16")
    check = model_check(model)
    assert compare_models([check]).reasons == {}
    launch = expert_linear.write_of_experts
    monkeypatch.setattr(expert_linear, "write_of_experts", scaled(launch, 4))
    with pytest.raises(KernelError, match=r"^multiply_routed .*: no way is right on this GPU: kernel .* off by"):
        compare_models([model_check(Model(tmp_path / "few bits", device="cuda", dtype="float16"))])


def test_layers_that_may_be_fused_are_compared_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, fusing = (model_check(loaded(folder, quantization="none", skinny_gemms=way)) for way in ("off", "on"))
    for check in (usual, fusing):
        assert compare_models([check]).reasons == {}
    assert fusing.checks.num_compared == usual.checks.num_compared
    monkeypatch.setattr(norm, "add_rms_norm", scaled(norm.add_rms_norm, 5))
    check = model_check(loaded(folder, quantization="none", skinny_gemms="on"))
    compare_models([check])
    assert {line.partition(" ")[0] for line in check.checks.fallen} == {"add_rms_norm"}
