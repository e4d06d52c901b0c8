"""Slots, sampling and moves beside the host's at the start, and what takes the place of a kernel that is off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

from executor_svc.config import ExecutorConfig
from executor_svc.gpu.checks.fallbacks import Fallbacks
from executor_svc.gpu.checks.steps import step_check as checking
from executor_svc.gpu.checks.steps.step_check import StepCheck
from executor_svc.gpu.choices.store import CheckStore
from executor_svc.gpu.choices.ways import KernelChecks, KernelError
from executor_svc.gpu.kernels import copy_pages as copying
from executor_svc.gpu.kernels.lora import tables
from executor_svc.gpu.kernels.sampling import draw, edits, floors, logits, logprobs, penalties, sampling
from executor_svc.gpu.kernels.sampling.state import field
from executor_svc.gpu.kernels.slots import commit, draft_layout, ngram_drafts, step_inputs
from executor_svc.gpu.kernels.states import step as states_step
from executor_svc.gpu.kernels.step_ways import StepWays
from executor_svc.gpu.slots import device_slots
from executor_svc.gpu.states import GpuStateKernels
from executor_svc.models.adapters.places import AdapterSizes
from executor_svc.speculation.ngram import NgramSource
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.checks.checked import loaded, refused
from tests.executor_svc.gpu.checks.compared_kernels import PAGE, launched_by_comparisons, rows
from tests.executor_svc.gpu.drafted_steps import MAX_DRAFTS, WITH_DRAFTS, make_model, outputs
from tests.helpers.executor.stepping import Stepper
from tests.helpers.marks import short_and_long

Broken = tuple[Any, str, Any]
"""A module, one of its names, and what stands there in place of what is right."""


def step_check(model: Model, folder: Path | None = None, reports: bool = False, **options: Any) -> StepCheck:
    checks = KernelChecks(model.device.torch_device, CheckStore(folder, {"gpu": "none"}), reports=reports)
    return StepCheck(model.loaded, model.device, ExecutorConfig(**model.options | options), checks)


def compared(check: StepCheck) -> Fallbacks:
    kernels = check.device.kernels
    assert isinstance(kernels, GpuStateKernels)
    fallbacks = Fallbacks(kernels, check.checks)
    check.run(fallbacks)
    return fallbacks


def reading(name: str) -> tl.constexpr:
    """The place of another field of a slot's record, for a kernel to read."""
    return tl.constexpr(field(name))


def one_less(launch: Callable[..., None]) -> Callable[..., None]:
    """A launch after whose work one word of the slots' state is off."""

    def wrong(staging: torch.Tensor, counts: Any, state: Any) -> None:
        launch(staging, counts, state)
        state.num_tokens[3] -= 1

    return wrong


def test_all_agree_and_the_next_start_compares_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(folder, AdapterSizes(num_places=2, max_rank=8))
    check = step_check(model, tmp_path, speculative="ngram")
    with launched_by_comparisons(monkeypatch) as launched:
        assert compared(check).reasons == {}
    assert check.checks.num_compared > 50
    again = step_check(model, tmp_path, speculative="ngram")
    compared(again)
    assert (again.checks.num_compared, again.checks.num_known) == (0, check.checks.num_compared)
    page = rows(PAGE.read_text(encoding="utf-8"))
    own = {file.removesuffix(".py") for file, how in page.items() if "`checks/steps/" in how}
    files = {module.replace(".", "/") for module in launched} - {"sampling/edits", "sampling/draw"}
    assert files | SEEN_OTHERWISE == own


PASSES = {"slots/draft_passes", "slots/head_rows", "sampling/draft_vocabulary"}
SEEN_OTHERWISE = {"sampling/sampling", "states/step", "rank_rows", *PASSES}
"""Its kernels are in two other files; models with recurrent layers, ranks, and what drafts."""


@pytest.mark.parametrize(
    ("broken", "label", "reason"),
    short_and_long(
        [
            ((draw, "_TOP_P", reading("temperature")), "sampling", "rows drawn: tokens: "),
            ((draw, "_SAMPLE_INDEX", reading("top_k")), "sampling", "rows drawn: tokens: "),
            ((floors, "_LOG_MIN_P", reading("top_n_sigma")), "sampling", "rows drawn, filtered, floored: tokens: "),
            ((edits, "_MIN_TOKENS", reading("top_k")), "sampling", "rows edited, drawn, filtered, floored: tokens: "),
            ((sampling, "race", refused), "sampling", "TypeError: "),
            ((penalties, "_PENALISED", reading("has_floor")), "penalties", "counts: "),
        ],
        [
            ((floors, "_LOG_MIN_P", reading("top_n_sigma")), "sampling", "rows drawn, filtered, floored: tokens: "),
            ((penalties, "_PENALISED", reading("has_floor")), "penalties", "counts: "),
        ],
    ),
)
def test_draws_that_are_off_are_the_hosts(
    broken: Broken, label: str, reason: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*broken)
    model = loaded(folder)
    found = compared(step_check(model, tmp_path)).reasons
    assert list(found) == [f"sampling/{label} (vocabulary 131)"]
    assert found.popitem()[1]["kernel"].startswith(reason)
    kernels = model.device.kernels
    assert isinstance(kernels, GpuStateKernels)
    assert kernels.step_ways == StepWays(draws_on_host=True)
    assert " other-" in kernels.name, "such an executor has another fingerprint"
    again = step_check(loaded(folder), tmp_path)
    compared(again)
    assert again.checks.num_compared == 0
    assert again.device.kernels.step_ways == StepWays(draws_on_host=True)  # type: ignore[attr-defined]


def test_logprobs_copies_and_drafts_that_are_off_have_other_ways(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, report, draft = checking.copy_pages, checking.row_logprobs, device_slots.draft_ngrams

    def without_the_last(*args: Any) -> None:
        copy(*args[:-1], args[-1] - 1)

    def off_by_little(*args: Any, **named: Any) -> None:
        report(*args, **named)
        args[-1].top.mul_(1.001)

    def of_longer_matches(*args: Any) -> None:
        draft(*args[:-2], 4, 4)
        args[1].num_drafts.clamp_(max=1)

    monkeypatch.setattr(checking, "kinds_of_step", lambda _: ())
    monkeypatch.setattr(checking, "copy_pages", without_the_last)
    monkeypatch.setattr(checking, "row_logprobs", off_by_little)
    monkeypatch.setattr(device_slots, "draft_ngrams", of_longer_matches)
    model = loaded(folder)
    found = compared(step_check(model, speculative="ngram"))
    kernels = model.device.kernels
    assert isinstance(kernels, GpuStateKernels)
    assert kernels.step_ways == StepWays(logprobs_by_torch=True, drafts_on_host=True, copies_by_torch=True)
    ways = {label.partition(" ")[0]: way for label, way in found.ways.items()}
    assert ways == {"copy_pages": "torch", "sampling/logprobs": "torch", "slots/ngram_drafts": "host"}
    copies, of_logprobs, drafts = (each["kernel"] for each in found.reasons.values())
    assert copies.startswith("pages: ")
    assert "is off by 0.000" in of_logprobs
    assert drafts.startswith("number of drafts: ")


UPDATES = (device_slots, "apply_updates", one_less), "slots/slot_updates: .* kernel num_tokens: 1 of "
INPUTS = (step_inputs, "ROPE_LENS", tl.constexpr(1)), "slots/step_inputs: .* kernel positions: "
CHOICES = (logits, "_NON_FINITE", tl.constexpr(3)), r"^sampling/logits \(vocabulary 131\): .* rows greedy: errors: "
OTHERS: list[tuple[Broken, str]] = [
    ((draft_layout, "NUM_DRAFTS", tl.constexpr(6)), "slots/draft_layout: .* kernel token_ids: "),
    ((commit, "MIN_TOKENS", tl.constexpr(1)), "slots/commit: .* kernel stopped: "),
    ((tables, "SEQ_SLOTS", tl.constexpr(0)), "lora/tables: .* kernel places: "),
]


@pytest.mark.parametrize(
    ("broken", "message"), short_and_long([UPDATES, INPUTS, CHOICES, *OTHERS], [UPDATES, INPUTS, CHOICES])
)
def test_slots_that_are_off_refuse_the_start(
    broken: Broken, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, other = broken
    monkeypatch.setattr(module, name, other(getattr(module, name)) if other is one_less else other)
    monkeypatch.setattr(checking, "kinds_of_step", lambda _: ())
    check = step_check(loaded(folder, AdapterSizes(num_places=2, max_rank=8)))
    with pytest.raises(KernelError, match=message + ".*; --kernel-checks report computes with it all the same$"):
        compared(check)


def test_what_slots_leave_behind_is_not_compared_further(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_inputs, "ROPE_LENS", tl.constexpr(1))
    check = step_check(loaded(folder), reports=True)
    found = compared(check)
    assert list(found.kept) == ["slots/step_inputs"]
    assert found.ways == {}


@pytest.mark.parametrize("name", ["_begin_states", "_end_states"])
def test_states_that_stand_elsewhere_refuse_the_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    made = make_checkpoint(tmp_path, "lfm2", vocab_size=131, dtype=torch.bfloat16, **layers)
    monkeypatch.setattr(states_step, name, refused)
    check = step_check(Model(made, device="cuda", dtype="bfloat16"))
    with pytest.raises(KernelError, match=r"^states/step: .* kernel TypeError: "):
        compared(check)


@pytest.mark.parametrize("drafts", short_and_long([False, True], [True]))
def test_steps_by_the_other_ways_give_the_same(drafts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of all kinds, with kernels that are not there: no step launches what has fallen back."""
    made = make_model(tmp_path)
    expected = outputs(Stepper(Model(made), max_drafts=MAX_DRAFTS), 0)
    model = Model(made, device="cuda")
    kernels = model.device.kernels
    assert isinstance(kernels, GpuStateKernels)
    kernels.step_ways = StepWays(True, True, True, True)
    for module, name in ((sampling, "race"), (sampling, "edit"), (sampling, "finish"), (penalties, "_count"),
                         (penalties, "_add"), (logprobs, "_sum"), (copying, "_copy_pages"),
                         (ngram_drafts, "_draft_ngrams")):  # fmt: skip
        monkeypatch.setattr(module, name, refused)
    stepper = Stepper(model, drafts=NgramSource, **WITH_DRAFTS)
    found = outputs(stepper, MAX_DRAFTS if drafts else 0)
    assert found.tokens == expected.tokens
    assert found.top == expected.top
    for slot, values in expected.logprobs.items():
        assert found.logprobs[slot] == pytest.approx(values, abs=1e-4)
    assert (found.num_accepted > 0) == drafts
