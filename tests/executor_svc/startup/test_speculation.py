"""Which sources of drafts there are on which device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from executor_svc.config import ExecutorConfig
from executor_svc.models.heads.mtp import MtpHead
from executor_svc.startup.speculation import (
    SpeculationError,
    check_speculation,
    load_speculative_model,
    model_on_gpu,
)
from tests.executor_svc.driver import Model
from tests.helpers.models.mtp_heads import make_mimo


@pytest.mark.parametrize("kind", ["off", "ngram", "suffix", "auto"])
@pytest.mark.parametrize("device", ["cpu", "cuda", "simulated"])
def test_sources_without_a_model_are_everywhere(kind: str, device: str) -> None:
    check_speculation(ExecutorConfig(model="x", speculative=kind), device)


@pytest.mark.parametrize("kind", ["draft", "auto"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_draft_model_is_everywhere(kind: str, device: str) -> None:
    check_speculation(ExecutorConfig(model="x", speculative=kind, speculative_model="y"), device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_draft_model_must_be_named(device: str) -> None:
    with pytest.raises(SpeculationError, match="--speculative draft needs --speculative-model"):
        check_speculation(ExecutorConfig(model="x", speculative="draft"), device)


def on_gpu(kind: str, head: str, *, recordable: bool) -> None:
    """Load a draft beside a target on a GPU, as far as it goes without them."""
    target: Any = SimpleNamespace(recordable=recordable, geometry=SimpleNamespace(name="a/mamba"))
    device: Any = SimpleNamespace(name="cuda")
    load_speculative_model(ExecutorConfig(model="x", speculative=kind, speculative_model=head), device, target)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_heads_are_everywhere(device: str, tmp_path: Path) -> None:
    check_speculation(ExecutorConfig(model="x", speculative="eagle3", speculative_model="y"), device)
    folder = str(make_mimo(tmp_path, num_hidden_layers=1))
    check_speculation(ExecutorConfig(model=folder, speculative="mtp"), device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("kind", "expected"), [("auto", MtpHead), ("ngram", type(None)), ("suffix", type(None))])
def test_auto_takes_the_head_of_the_checkpoint(kind: str, expected: type, device: str, tmp_path: Path) -> None:
    model = Model(make_mimo(tmp_path, num_hidden_layers=1), device=device, speculative=kind)
    draft = load_speculative_model(ExecutorConfig(**model.options), model.device, model.loaded)
    assert isinstance(None if draft is None else draft.model, expected)
    assert isinstance(model_on_gpu(draft, model.device), type(None) if device == "cpu" else expected)


@pytest.mark.parametrize("kind", ["draft", "eagle3", "auto"])
def test_a_target_that_runs_through_transformers_has_no_draft_on_a_gpu(kind: str) -> None:
    with pytest.raises(SpeculationError, match="--speculative-model y is not possible on a GPU with --model a/mamba"):
        on_gpu(kind, "y", recordable=False)


def test_a_model_for_a_source_that_takes_none_is_refused_as_on_the_cpu() -> None:
    for device in ("cpu", "cuda"):
        with pytest.raises(SpeculationError, match="--speculative-model y: only with"):
            check_speculation(ExecutorConfig(model="x", speculative="ngram", speculative_model="y"), device)


@pytest.mark.parametrize(("max_num_seqs", "warned"), [(5, True), (6, False)])
def test_too_few_rows_for_all_drafts_are_logged(
    max_num_seqs: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = ExecutorConfig(model="x", speculative="suffix", num_speculative_tokens=5, max_num_seqs=max_num_seqs)
    check_speculation(config, "cpu")
    assert ("at most 4 drafts" in caplog.text) == warned
