"""Which sources of drafts there are on which device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from executor_svc.config import ExecutorConfig
from executor_svc.startup.speculation import SpeculationError, check_speculation, load_speculative_model
from tests.helpers.models.eagle3_heads import HeadShape, make_head


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


def test_heads_are_on_the_cpu(tmp_path: Path) -> None:
    config = ExecutorConfig(model="x", speculative="eagle3", speculative_model="y")
    check_speculation(config, "cpu")
    with pytest.raises(SpeculationError, match=r"^--speculative eagle3 is not possible on a GPU so far"):
        check_speculation(config, "cuda")
    head = make_head(tmp_path, HeadShape("old"))
    with pytest.raises(SpeculationError, match=f"auto with the head .*{head.name} is not possible on a GPU"):
        on_gpu("auto", str(head), recordable=True)


def test_a_target_that_runs_through_transformers_has_no_draft_model_on_a_gpu() -> None:
    with pytest.raises(SpeculationError, match="--speculative-model y is not possible on a GPU with --model a/mamba"):
        on_gpu("draft", "y", recordable=False)


def test_a_model_for_a_source_that_takes_none_is_refused_as_on_the_cpu() -> None:
    for device in ("cpu", "cuda"):
        with pytest.raises(SpeculationError, match="--speculative-model y: only with"):
            check_speculation(ExecutorConfig(model="x", speculative="ngram", speculative_model="y"), device)


def test_a_head_of_the_checkpoint_is_on_the_cpu() -> None:
    with pytest.raises(SpeculationError, match="--speculative mtp is not possible on a GPU so far"):
        check_speculation(ExecutorConfig(model="x", speculative="mtp"), "cuda")


@pytest.mark.parametrize(("max_num_seqs", "warned"), [(5, True), (6, False)])
def test_too_few_rows_for_all_drafts_are_logged(
    max_num_seqs: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = ExecutorConfig(model="x", speculative="suffix", num_speculative_tokens=5, max_num_seqs=max_num_seqs)
    check_speculation(config, "cpu")
    assert ("at most 4 drafts" in caplog.text) == warned
