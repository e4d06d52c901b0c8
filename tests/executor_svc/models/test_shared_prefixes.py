"""When sequences that begin alike may share KV: unless rotary angles go by the length of the whole prompt."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza.v1 import execution_pb2 as pb
from executor_svc.app import build_executor
from executor_svc.config import ExecutorConfig
from executor_svc.service.description import description_to_wire
from tests.checkpoints import edit_config, make_llama
from tests.executor_svc.driver import Model, Tokens
from tests.helpers.models.golden import random_prompts

pytestmark = pytest.mark.slow

ORIGINAL = 64
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"short_factor": [1.0] * 5, "long_factor": [2.0] * 5, "original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = make_llama(tmp_path / "model")
    edit_config(folder, max_position_embeddings=ORIGINAL)
    return folder


def announced(checkpoint: Path, rope: dict[str, Any], max_model_len: int | None = None) -> bool:
    edit_config(checkpoint, rope_parameters={"rope_theta": 10000.0, **rope})
    config = ExecutorConfig(
        model=str(checkpoint), num_gpu_blocks=8, max_num_seqs=2, max_num_batched_tokens=16, num_threads=1,
        max_model_len=max_model_len,
    )  # fmt: skip
    described: Future[Any] = Future()
    build_executor(config, described)
    return pb.EXECUTOR_FEATURE_SHARED_PREFIXES in description_to_wire(described.result()).features


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
        {"rope_type": "longrope", "factor": 2.0, **LONG},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_angles_of_positions_alone_are_shared(checkpoint: Path, rope: dict[str, Any]) -> None:
    assert announced(checkpoint, rope)


def test_angles_of_lengths_are_not_once_they_may_differ(checkpoint: Path) -> None:
    assert not announced(checkpoint, DYNAMIC)
    assert not announced(checkpoint, DYNAMIC, ORIGINAL + 1)
    assert announced(checkpoint, DYNAMIC, ORIGINAL)


@pytest.mark.parametrize(("length", "same"), [(ORIGINAL, True), (ORIGINAL + 1, False)])
def test_why(checkpoint: Path, length: int, same: bool) -> None:
    """The logits of a token, in a short prompt and at the beginning of a longer one."""
    edit_config(checkpoint, rope_parameters={"rope_theta": 10000.0, **DYNAMIC})
    model = Model(checkpoint)
    (tokens,) = random_prompts(131, (length,))
    rows = [model.driver().step([(Tokens(tokens[:20], num_prompt=num_prompt), 20)])[0] for num_prompt in (20, length)]
    assert torch.equal(*rows) is same
