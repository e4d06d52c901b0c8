"""Starts with fused layers: what they compile, what they measure, and drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.gpu import runner as gpu_runner
from executor_svc.gpu.choices.store import CheckStore
from executor_svc.gpu.choices.ways import KernelError
from executor_svc.gpu.device import GpuDevice
from executor_svc.gpu.skinny import layers, probe
from executor_svc.gpu.skinny.recording import PROBED, EitherKernels
from executor_svc.gpu.step import GpuStepExecutor
from executor_svc.models.heads.draft import load_draft
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu import test_warm_up
from tests.executor_svc.gpu.checks.checked import refused
from tests.executor_svc.gpu.test_warm_up import Compiled, run, started
from tests.helpers.executor.plans import scheduled, sequence
from tests.helpers.executor.stepping import Stepper

pytestmark = test_warm_up.pytestmark
compiled = test_warm_up.compiled
SIZES: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 80, "head_dim": 64, "num_hidden_layers": 1}


def made(folder: Path, **shape: Any) -> Path:
    return make_checkpoint(folder, "llama", vocab_size=131, dtype=torch.bfloat16, **SIZES | shape)


def names_of(compiled: Compiled) -> set[str]:
    return {str(name).rpartition(".")[2] for known in compiled for name in known[:2]}


def decodes(executor: GpuStepExecutor) -> tuple[list[list[int]], list[int]]:
    """Tokens of steps, and the drafts of the first decode: of the last token of a prompt that repeats itself."""
    first = sequence(0, [5] * 20, [3, 1, 9, 4, 6, 11], max_drafts=3, max_len=48)
    second = sequence(1, [7, 3, 9], [5, 2, 10], max_drafts=3, max_len=48)
    steps: list[dict[str, Any]] = [
        {"admitted": (first,), "scheduled": scheduled((0, 19, False))},
        {"decode_ready": True, "max_drafts": 3},
        {"admitted": (second,), "scheduled": scheduled((1, 3, True)), "decode_ready": True, "max_drafts": 3},
        *[{"decode_ready": True, "max_drafts": 3}] * 2,
    ]
    results = run(executor, steps)
    return [result.token_ids.tolist() for result in results], results[1].num_drafts.tolist()


@pytest.mark.parametrize(
    ("speculative", "enforce_eager"),
    [
        pytest.param("ngram", False, marks=pytest.mark.long),
        ("ngram", True),
        pytest.param("draft", False, marks=pytest.mark.long),
    ],
)
def test_no_step_waits_for_a_compiler(
    speculative: str, enforce_eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Compiled
) -> None:
    """And drafts give the tokens that they give where layers are computed apart."""
    folder = made(tmp_path)
    options: dict[str, Any] = {"speculative": speculative, "num_speculative_tokens": 3, "max_num_seqs": 4}
    if speculative == "draft":
        options["speculative_model"] = str(folder)
    options |= {"enforce_eager": enforce_eager, "num_gpu_blocks": 24}
    executor = started(folder, monkeypatch, skinny_gemms="on", **options)
    assert {"skinny_kernel", "new_keys_kernel", "square_rows_kernel"} <= names_of(compiled)
    known = set(compiled)
    found = decodes(executor)
    assert compiled == known
    assert found[1] == [3]
    if not enforce_eager:
        return
    assert found == decodes(started(folder, monkeypatch, **options))


def kernels_of(model: Model) -> EitherKernels:
    assert isinstance(model.device, GpuDevice)
    found = model.device.kernels
    assert isinstance(found, EitherKernels)
    return found


def probed(folder: Path, monkeypatch: pytest.MonkeyPatch, times: list[float]) -> tuple[Model, Stepper]:
    """A start that measures: in turn layers apart and fused ones, of 1, 2, 4 and 8 rows."""

    def measure(run: Callable[[], None]) -> tuple[Callable[[], None], float]:
        run()
        return run, times.pop(0)

    monkeypatch.setattr(gpu_runner, "probe_choices", partial(probe.probe_choices, measure=measure))
    model = Model(folder, device="cuda", skinny_gemms="auto", max_num_seqs=8, block_size=8, num_gpu_blocks=64)
    stepper = Stepper(model)
    assert not times
    return model, stepper


def test_sizes_that_were_faster_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path, num_hidden_layers=2)
    model, stepper = probed(folder, monkeypatch, [2.0, 1.0, 1.0, 2.0, 1.0, 0.9, 1.0, 1.0])
    assert [choice.sizes for choice in kernels_of(model).choices] == [(1, 4)]
    # What the probe wrote is gone: the tokens are those of a start without it.
    opening: dict[str, Any] = {"admitted": (sequence(0, [5, 9, 2], stepper.blocks(0)),)}
    opening["scheduled"] = scheduled((0, 3, True))
    plain = Stepper(Model(folder, device="cuda"))
    for fields in (opening, {"decode_ready": True}, {"decode_ready": True}):
        assert stepper.step(**fields).token_ids.tolist() == plain.step(**fields).token_ids.tolist()


def test_wrong_results_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_MOST_ERROR", {torch.bfloat16: -1.0})
    model, _ = probed(made(tmp_path), monkeypatch, [2.0, 1.0] * 4)
    assert [choice.sizes for choice in kernels_of(model).choices] == [()]


@pytest.mark.parametrize(
    "options",
    [{"skinny_gemms": "off"}, {"numerics": "exact"}, {"quantization": "int8"}, {"dtype": "float32"},
     {"kv_cache_dtype": "fp8"}],
    ids=str,
)  # fmt: skip
def test_where_they_are_not_used(options: dict[str, Any], tmp_path: Path) -> None:
    """No choice is recorded, whatever the option says."""
    model = Model(made(tmp_path), device="cuda", **{"skinny_gemms": "on"} | options)
    Stepper(model)
    assert not kernels_of(model).choices


def wrong_rows(product: Callable[..., None]) -> Callable[..., None]:
    """Products of which those of four rows are off in one of them."""

    def computed(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *others: Any, **named: Any) -> None:
        product(x, weight, out, *others, **named)
        if len(x) == 4:
            out[-1] *= 1.2

    return computed


def without_keys(attend: Callable[..., None]) -> Callable[..., None]:
    """Attention that writes the new keys and values of the first row alone, and attends to those of all."""

    def attended(call: Any, new: Any, *others: Any, **named: Any) -> None:
        cache = call.kv_layer.clone()
        attend(call, new, *others, **named)
        at = new.slots[1:] // cache.shape[3]
        call.kv_layer[at] = cache[at]

    return attended


def on(folder: Path, monkeypatch: pytest.MonkeyPatch, kept: Path | None = None, **options: Any) -> EitherKernels:
    """What a start with --skinny-gemms on computes with, as on a GPU; kept: where it finds what earlier ones did."""
    monkeypatch.setattr(probe, "_is_here", lambda _: True)
    model = Model(folder, device="cuda", skinny_gemms="on", block_size=8, num_gpu_blocks=64, **options)
    kernels = kernels_of(model)
    kernels.checks.store = CheckStore(kept, {"gpu": "none"})
    Stepper(model, num_slots=4)
    assert [choice.sizes for choice in kernels.choices] == [PROBED]
    return kernels


def test_what_is_on_is_compared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = made(tmp_path / "model", num_hidden_layers=2)
    caplog.set_level(logging.INFO)
    for num_compared in (3, 0):
        caplog.clear()
        assert on(folder, monkeypatch, tmp_path).checks.num_compared == num_compared
        assert "steps of 1, 2, 4 rows by fused layers agree with layers apart" in caplog.messages


KEYS = "attention_of_new", without_keys, r"steps of 2 rows: .*: fused new keys and values of layer 0: a row is off"
PRODUCT = "skinny_product", wrong_rows, r"steps of 4 rows: .*: fused hidden states: a row is off"
NOTHING = "attention_of_new", lambda _: refused, r"steps of 1 rows: .*: fused RuntimeError: PassManager::run failed$"


@pytest.mark.parametrize(("name", "change", "message"), [KEYS, PRODUCT, NOTHING])
def test_what_is_on_and_wrong_ends_the_start(
    name: str, change: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, name, change(getattr(layers, name)))
    with pytest.raises(KernelError, match=rf"^--skinny-gemms on: fused layers \(1 of 48 numbers .* {message}"):
        on(made(tmp_path), monkeypatch)


def test_the_operator_has_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = made(tmp_path)
    monkeypatch.setattr(layers, "skinny_product", wrong_rows(layers.skinny_product))
    (line,) = on(folder, monkeypatch, kernel_checks="report").checks.kept
    assert line.startswith("--skinny-gemms on: fused layers (")
    assert f"NOT RIGHT on this GPU, and computed all the same (--kernel-checks report): {line}" in caplog.messages
    assert on(folder, monkeypatch, kernel_checks="off").checks.num_compared == 0


def test_a_draft_model_is_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_is_here", lambda _: True)
    model = Model(made(tmp_path / "model"), device="cuda", skinny_gemms="on", block_size=8, num_gpu_blocks=64)
    other = made(tmp_path / "draft", intermediate_size=64)
    draft = load_draft(str(other), ExecutorConfig(**model.options), model.device, model.loaded)
    stepper = Stepper(model, num_slots=2, max_drafts=3, draft=draft)
    assert kernels_of(model).checks.num_compared == 2 * 2, "1 and 2 rows"
    assert not any(bool(layer.any()) for layer in stepper.pools.draft_layers)
