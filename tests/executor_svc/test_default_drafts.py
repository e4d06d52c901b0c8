"""Drafts are the default of models on the CPU whose states need no room for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_svc.config import ExecutorConfig
from executor_svc.startup.build import build_model
from tests.checkpoints import make_checkpoint


@pytest.mark.parametrize(
    ("family", "options", "most"),
    [("llama", {}, 5), ("lfm2", {}, 0), ("lfm2", {"speculative": "suffix"}, 5), ("llama", {"speculative": "off"}, 0)],
)
def test_the_default_hangs_on_the_layers(family: str, options: dict[str, str], most: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family)
    executor, _ = build_model(ExecutorConfig(model=str(folder), num_gpu_blocks=20, num_threads=1, **options))
    assert executor.limits.max_drafts == most
