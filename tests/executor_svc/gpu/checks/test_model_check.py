"""A model's operations beside their references at the start: what agrees, and what takes the place of what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.gpu import linear as gpu_linear
from executor_svc.gpu.checks.model_check import ModelCheck, compare_models
from executor_svc.gpu.choices.ways import KernelChecks, KernelError
from executor_svc.gpu.kernels import gpu_kernels as launches
from executor_svc.gpu.kernels import norm
from executor_svc.gpu.kernels.attention import plan as attention_plan
from executor_svc.gpu.kernels.few_bits import linear as few_bits
from executor_svc.models.decoder import Decoder
from executor_svc.startup.speculation import load_speculative_model
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.checks.checked import (
    HEADS,
    assert_same_tokens,
    loaded,
    logits_of,
    model_check,
    refused,
    scaled,
)
from tests.executor_svc.gpu.runner.test_families import tokens_of
from tests.helpers.marks import short_and_long
from tests.helpers.models.quantized_layouts import quantize_checkpoint

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", HEADS, {}),
    "norms of heads, int8, a cache in fp8": ("qwen3", HEADS, {"kv_cache_dtype": "fp8", "quantization": "int8"}),
    "windows and caps, rows in fp8": (
        "gemma2", {**HEADS, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 144},
        {"quantization": "fp8_w8a8"},
    ),
    "experts in int8": ("qwen3_moe", HEADS, {"quantization": "int8"}),
    "sinks and experts": ("gpt_oss", HEADS, {}),
    "latents": ("deepseek_v3", {"num_hidden_layers": 2}, {"kv_cache_dtype": "fp8"}),
    "delta rule": (
        "qwen3_5_delta", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}, {},
    ),
    "mamba": ("granite_h", {}, {}),
    "convolutions": ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, {}),
    "all heads together": ("olmo2", HEADS, {}),
    "exact mode": ("llama", HEADS, {"numerics": "exact", "dtype": "float32"}),
}  # fmt: skip
SHORT = ("norms of heads, int8, a cache in fp8", "latents", "exact mode")


@pytest.mark.parametrize("name", short_and_long([*FAMILIES], [*SHORT]))
def test_operations_agree(name: str, tmp_path: Path) -> None:
    family, shape, options = FAMILIES[name]
    folder = make_checkpoint(tmp_path, family, **{"vocab_size": 131, "dtype": torch.bfloat16} | shape)
    check = model_check(Model(folder, device="cuda", **{"dtype": "bfloat16"} | options), long=150)
    assert compare_models([check]).reasons == {}
    assert check.checks.num_compared > 25


@pytest.mark.parametrize("layout", short_and_long(["gptq", "w4a16 with actorder", "fp8"], ["gptq"]))
def test_weights_in_few_bits_agree_with_what_they_are_widened_to(
    layout: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_checkpoint(folder, layout, tmp_path / "few bits", tmp_path / "dense")
    model = loaded(tmp_path / "few bits", dtype="float16", quantization="none")
    check = model_check(model)
    assert compare_models([check]).reasons == {}
    expected = logits_of(model)
    monkeypatch.setattr(few_bits, "linear_few_bits", scaled(few_bits.linear_few_bits, 3))
    model = loaded(tmp_path / "few bits", dtype="float16", quantization="none")
    check = model_check(model)
    compare_models([check])
    assert {each.partition(" ")[0] for each in check.checks.fallen} == {"linear"}
    assert "GpuStoredLinear" in check.checks.fallen[0]
    assert_same_tokens(logits_of(model), expected)


def test_a_draft_model_is_compared_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the layers that it has in the blocks of its target."""
    options = {"speculative": "draft", "speculative_model": str(folder), "num_speculative_tokens": 2}
    model = loaded(folder, quantization="none", **options)
    config = ExecutorConfig(**model.options)
    draft = load_speculative_model(config, model.device, model.loaded)
    assert draft is not None
    assert isinstance(draft.model, Decoder)

    def compared() -> KernelChecks:
        checks = KernelChecks(model.device.torch_device)
        where = model.loaded, model.device, config, checks, draft.layers
        compare_models([ModelCheck(*where, long=20), ModelCheck(*where, draft.model, long=20)])
        return checks

    assert (right := compared()).fallen == []
    monkeypatch.setattr(norm, "rms_norm", scaled(norm.rms_norm, 3))
    found = compared()
    assert len(found.fallen) == 1
    assert found.num_compared > right.num_compared, "the target's steps are run again"


WRONG: dict[str, tuple[Any, str, int | None, str]] = {
    "a norm that is off": (norm, "rms_norm", 3, "rms_norm (x 64 bfloat16, weight 64 bfloat16): torch, as kernel"),
    "a norm that does not compile": (
        norm, "add_rms_norm", None,
        "add_rms_norm (x 64 bfloat16, residual 64 bfloat16, weight 64 bfloat16): torch, as kernel RuntimeError: Pass",
    ),
    "a rotation that does not compile": (
        launches, "rope_write_kv", None, "rope_write_kv (qkv 512 bfloat16, 64 rotated, blocks of 16 bfloat16, 4 heads",
    ),
    "products that are off": (gpu_linear, "linear_w8", 4, "linear (x 64 bfloat16, W8Linear 64 to 512"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*WRONG])
def test_pytorch_takes_the_place_of_a_kernel(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One operation alone, and the model gives what it gives with right kernels."""
    owner, function, place, line = WRONG[name]
    expected = logits_of(loaded(folder))
    launch = getattr(owner, function)
    monkeypatch.setattr(owner, function, refused if place is None else scaled(launch, place))
    model = loaded(folder)
    usual = model.device.kernels.name
    check = model_check(model)
    compare_models([check])
    assert any(each.startswith(line) for each in check.checks.fallen), check.checks.fallen
    assert {each.partition(" ")[0] for each in check.checks.fallen} == {line.partition(" ")[0]}
    assert model.device.kernels.name.startswith(f"{usual} other-"), "the fingerprint tells"
    if function == "rms_norm":
        x = torch.randn(3, 64).bfloat16()
        at_once = model.device.kernels.rms_norm(x, torch.ones(64).bfloat16(), 1e-5)
        assert (at_once - x / x.float().square().mean(-1, keepdim=True).sqrt()).abs().max() < 0.02
    assert_same_tokens(logits_of(model), expected)


def test_attention_falls_back_to_other_tiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = attention_plan.attention

    def wrong(call: Any, arch: int) -> None:
        launch(call, arch)
        if arch == 90:
            call.out.mul_(1.05)

    expected = logits_of(loaded(folder))
    monkeypatch.setattr(attention_plan, "attention", wrong)
    model = loaded(folder)
    check = model_check(model)
    compare_models([check])
    (line,) = check.checks.fallen
    assert line.startswith("attention (q 64 bfloat16, blocks of 16 bfloat16, 4 heads of 64, 2 of KV): tiles of 80, as")
    assert_same_tokens(logits_of(model), expected)


@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), ("deepseek_v3", "float32")])
def test_attention_without_right_tiles_is_pytorchs(
    family: str,
    dtype: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """So the service starts at all, and says how slow it is, at the next start too."""
    if family != "llama":
        shape = {"vocab_size": 131, "num_hidden_layers": 2, "dtype": torch.bfloat16}
        folder = make_checkpoint(tmp_path / "model", family, **shape)
    usual = loaded(folder, quantization="none", dtype=dtype)
    expected, tokens = logits_of(usual), tokens_of(usual)
    for launch in ("attention", "split_attention"):
        monkeypatch.setattr(attention_plan, launch, refused)
    for start in ("first", "next"):
        model = loaded(folder, quantization="none", dtype=dtype)
        check = model_check(model, tmp_path / "checks")
        caplog.clear()
        assert compare_models([check]).is_slow
        assert {line.partition(" ")[0] for line in check.checks.fallen} <= {"attention", "latent_attention"}, start
        assert all(": torch, as kernel RuntimeError: Pass" in line for line in check.checks.fallen)
        slow = [line for line in caplog.messages if "VERY SLOW" in line]
        assert len(slow) == len(check.checks.fallen) >= 1
        assert "s a layer for a prompt of 61 tokens; steps run without CUDA graphs" in slow[0]
    assert " other-" in model.device.kernels.name
    assert_same_tokens(logits_of(model), expected)
    assert dtype == "bfloat16" or tokens_of(model) == tokens, "by slots, whose plans are filled on the device"


def test_exact_mode_has_no_other_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "rms_norm", scaled(norm.rms_norm, 3))
    with pytest.raises(KernelError, match=r"rms_norm .*: no way is right .* --numerics exact has no other way"):
        compare_models([model_check(loaded(folder, numerics="exact", quantization="none"))])


def test_the_next_start_compares_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(norm, "rms_norm", scaled(norm.rms_norm, 3))
        first = model_check(loaded(folder), tmp_path)
        compare_models([first])
    again = model_check(loaded(folder), tmp_path)
    compare_models([again])
    assert (again.checks.num_compared, again.checks.fallen) == (0, first.checks.fallen)
    assert again.checks.num_known > 25
    for changed, why in (({"quantization": "none"}, "other kernels"), ({"max_num_batched_tokens": 1024}, "other rows")):
        other = model_check(loaded(folder, **changed), tmp_path)
        compare_models([other])
        assert other.checks.num_compared > 25, why


def test_a_kernel_that_broke_the_context_is_not_launched_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal instruction was encountered")

    monkeypatch.setattr(norm, "rms_norm", breaks)
    with pytest.raises(KernelError, match=r"rms_norm .*: kernel has broken the GPU's context"):
        compare_models([model_check(loaded(folder), tmp_path)])
    monkeypatch.setattr(norm, "rms_norm", lambda *_: pytest.fail("it is launched"))
    check = model_check(loaded(folder), tmp_path)
    compare_models([check])
    assert [each.partition(":")[2] for each in check.checks.fallen] == [
        " torch, as kernel the process ended while it ran"
    ]
