"""A tiny model that is compared in many ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.executor_svc.gpu.checks.checked import HEADS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, **HEADS}
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", vocab_size=131, dtype=torch.bfloat16, **sizes)
