"""What prepares the passes of draft models and heads at the start: wrong kernels are found, and nothing drafts then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton.language as tl

from executor_svc.config import ExecutorConfig
from executor_svc.gpu.checks.steps import head_rows as checked_rows
from executor_svc.gpu.checks.steps import step_check as checking
from executor_svc.gpu.checks.steps.step_check import StepCheck
from executor_svc.gpu.choices.store import CheckStore
from executor_svc.gpu.choices.ways import KernelChecks
from executor_svc.gpu.kernels.slots import draft_passes, head_rows
from executor_svc.gpu.sampling.state import SlotSamplingState
from executor_svc.gpu.slots import device_slots
from executor_svc.models.heads.draft import LoadedDraft, load_draft
from executor_svc.startup import build
from executor_svc.startup.executors import make_device
from executor_svc.startup.gpu_report import ComparedKernels, StartReport
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.checks.checked import loaded, refused, scaled
from tests.executor_svc.gpu.checks.compared_kernels import launched_by_comparisons
from tests.executor_svc.gpu.checks.test_adapters_and_heads import with_eagle3
from tests.executor_svc.gpu.checks.test_steps_compared import PASSES, compared
from tests.helpers.marks import short_and_long
from tests.helpers.models.agreeing_heads import make_agreeing

OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"speculative": "draft", "num_speculative_tokens": 4},
    "head": {"speculative": "eagle3", "num_speculative_tokens": 4},
}
Drafted = tuple[Model, LoadedDraft[Any]]


@pytest.fixture(scope="module")
def drafted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Drafted]:
    """Makes a model and what drafts for it."""
    targets = {"head": with_eagle3(tmp_path_factory.mktemp("head"))}

    def made(kind: str) -> Drafted:
        if kind not in targets:
            model = loaded(folder, quantization="none")
            targets[kind] = model, load_draft(str(folder), ExecutorConfig(**model.options), model.device, model.loaded)
        return targets[kind]

    return made


@pytest.fixture(autouse=True)
def _choices_have_tests_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking._Comparison, "_chosen", lambda *_: None)


def step_check(drafted: Drafted, kind: str, folder: Path | None = None, reports: bool = False) -> StepCheck:
    model, draft = drafted
    checks = KernelChecks(model.device.torch_device, CheckStore(folder, {"gpu": "none"}), reports=reports)
    config = ExecutorConfig(**model.options | OPTIONS[kind])
    return StepCheck(model.loaded, model.device, config, checks, draft.layers, draft.model)


@pytest.mark.parametrize(("kind", "own"), [("model", {"slots/draft_passes"}), ("head", PASSES)])
def test_what_prepares_passes_agrees(
    kind: str, own: set[str], drafted: Callable[[str], Drafted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = step_check(drafted(kind), kind, tmp_path)
    with launched_by_comparisons(monkeypatch) as launched:
        found = compared(check)
    assert (found.reasons, found.has_passes) == ({}, True)
    assert {module.replace(".", "/") for module in launched} & PASSES == own
    again = step_check(drafted(kind), kind, tmp_path)
    compared(again)
    assert (again.checks.num_compared, again.checks.num_known) == (0, check.checks.num_compared)


Change = Callable[[Any], Any]
"""Returns what stands in the place of a kernel's launch, or of a place that it reads or writes."""


def to_place(place: int) -> Change:
    """Another row of the slots' numbers, or of a step's matrices."""
    return lambda _: tl.constexpr(place)


def of_the_next_pass(launch: Any) -> Any:
    """A launch that leaves the draft of its pass one place too far."""
    return lambda tokens, errors, state, buffers, num_seqs, index, *others, **named: launch(
        tokens, errors, state, buffers, num_seqs, index + 1, *others, **named
    )


def without_errors(launch: Any) -> Any:
    """A launch that reads no errors."""
    return lambda tokens, errors, *others, **named: launch(tokens, errors * 0, *others, **named)


def without_the_last(launch: Any) -> Any:
    """A launch over all but the last token of a step."""
    return lambda state, buffers, sizes: launch(state, buffers, replace(sizes, num_tokens=sizes.num_tokens - 4))


WRONG: dict[str, tuple[str, Any, str, Change, str, str]] = {
    "how many drafts there are": (
        "model", draft_passes, "DRAFTS_END", to_place(7), "slots/draft_passes", "num_drafts: ",
    ),
    "where a pass writes keys": ("model", draft_passes, "ROPE_LENS", to_place(1), "slots/draft_passes", "positions: "),
    "which rows draft": ("head", draft_passes, "NUM_GUESSED", to_place(9), "slots/draft_passes", "num_guessed: "),
    "what a pass leaves": ("head", device_slots, "next_pass", of_the_next_pass, "slots/draft_passes", "drafts: "),
    "a row that has failed": ("model", device_slots, "next_pass", without_errors, "slots/draft_passes", "num_drafts: "),
    "what a head reads": ("head", head_rows, "NUM_TOKENS", to_place(1), "slots/head_rows", "token_ids: "),
    "tokens of a long step": (
        "head", checked_rows, "read_next_tokens", without_the_last, "slots/head_rows", "token_ids: ",
    ),
    "what is kept": (
        "head", checked_rows, "keep_results", lambda launch: scaled(launch, 1), "slots/head_rows", "results: one ",
    ),
    "ids": ("head", checked_rows, "to_target", lambda _: lambda *_: None, "sampling/draft_vocabulary", "ids: "),
    "logits": (
        "head", checked_rows, "spread", lambda launch: scaled(launch, 2), "sampling/draft_vocabulary", "logits: one",
    ),
    "a kernel that does not run": (
        "model", draft_passes, "_next_pass", lambda _: refused, "slots/draft_passes", "TypeError: ",
    ),
}  # fmt: skip
QUICK = [
    "how many drafts there are", "what a pass leaves", "a row that has failed", "what a head reads", "what is kept",
    "ids", "logits",
]  # fmt: skip


@pytest.mark.parametrize("name", short_and_long(WRONG, QUICK))
def test_without_right_passes_nothing_drafts(
    name: str, drafted: Callable[[str], Drafted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, module, attribute, change, kernel, reason = WRONG[name]
    monkeypatch.setattr(module, attribute, change(getattr(module, attribute)))
    check = step_check(drafted(kind), kind, tmp_path)
    found = compared(check)
    assert not found.has_passes
    (line,) = found.lines()
    assert line.startswith(kernel)
    assert f": no drafts, as kernel {reason}" in line
    again = step_check(drafted(kind), kind, tmp_path)
    assert not compared(again).has_passes
    assert again.checks.num_compared == 0


def test_report_drafts_all_the_same(drafted: Callable[[str], Drafted], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of slots that passes have left nothing more is compared; rows behind a step leave nothing in slots."""
    monkeypatch.setattr(head_rows, "NUM_TOKENS", tl.constexpr(1))
    found = compared(step_check(drafted("head"), "head", reports=True))
    assert (list(found.kept), found.has_passes) == (["slots/head_rows (x 40 float32)"], True)
    monkeypatch.setattr(draft_passes, "ROPE_LENS", tl.constexpr(1))
    found = compared(step_check(drafted("model"), "model", reports=True))
    assert (list(found.kept), found.has_passes) == (["slots/draft_passes"], True)


def test_drafts_that_stay_counted_are_found(drafted: Callable[[str], Drafted], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would give wrong tokens: penalties would see refused drafts."""
    monkeypatch.setattr(SlotSamplingState, "recount", lambda *_: None)
    found = compared(step_check(drafted("model"), "model"))
    assert found.ways == {"sampling/penalties (vocabulary 131)": "host"}


@pytest.mark.parametrize(
    ("kind", "left"), short_and_long([("eagle3", "off"), ("draft", "off"), ("auto", "auto")], [("eagle3", "off")])
)
def test_a_start_goes_on_without_them(
    kind: Any, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, head = make_agreeing(tmp_path)
    model = str(target if kind == "draft" else head)
    config = ExecutorConfig(model=str(target), device="cuda", speculative=kind, speculative_model=model)
    device = make_device(config)
    seen: list[Any] = []

    def check(_: Any, __: Any, ___: Any, draft: Any) -> ComparedKernels:
        seen.append(draft)
        return ComparedKernels(has_passes=False)

    monkeypatch.setattr(build, "check_kernels", check)
    config, _, draft, _ = build._load(config, device, StartReport(device))
    assert seen[0] is not None
    assert (draft, config.speculative, config.speculative_model) == (None, left, None)
    assert f"--speculative {kind}: the draft model or head is NOT USED" in caplog.text
