"""The head of multi-token prediction in a Qwen3.5 checkpoint, against transformers' layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.config import ExecutorConfig
from executor_svc.models.folder import LoaderError
from executor_svc.models.heads.mtp_loading import check_mtp, has_mtp, load_mtp
from tests.executor_svc.driver import Model
from tests.executor_svc.models.heads.head_driver import HeadDriver, Text, random_tokens
from tests.helpers.models.qwen_mtp import PREFIX, ReferenceQwenMtp, make_qwen_mtp
from tests.helpers.models.wrapped_text import wrap_text

OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 96, "max_num_seqs": 8, "block_size": 16}


def config_of(folder: Path) -> ExecutorConfig:
    return ExecutorConfig(model=str(folder), device="cpu", num_threads=1, speculative="mtp", **OPTIONS)


@pytest.mark.parametrize("wrapped", [False, True])
def test_against_transformers(tmp_path: Path, wrapped: bool) -> None:
    """It reads states behind the final norm, and the embedding first; its layer has a gate."""
    folder = loaded = make_qwen_mtp(tmp_path / "text", "qwen3_5_text", seed=3)
    if wrapped:
        loaded = wrap_text(folder, tmp_path / "wrapped", "qwen3_5", "Qwen3_5ForConditionalGeneration")
    assert has_mtp(config_of(loaded))
    model = Model(loaded, **OPTIONS)
    draft = load_mtp(config_of(loaded), model.device, model.loaded)
    text = Text(random_tokens(1, 41), [9, 2, 14, 5, 7, 0])
    states, results, logits = HeadDriver(model, draft).step([(text, 40)])[0]
    expected, expected_logits = ReferenceQwenMtp(folder).forward(torch.tensor(text.tokens[1:]), states)
    torch.testing.assert_close(results, expected, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(logits, expected_logits, rtol=2e-4, atol=2e-4)
    assert draft.num_parameters == sum(
        each.numel() for key, each in load_file(folder / "model.safetensors").items() if key.startswith(PREFIX)
    )


def test_which_have_one(tmp_path: Path) -> None:
    folder = make_qwen_mtp(tmp_path, "qwen3_5_delta")
    assert has_mtp(config_of(folder))
    path = folder / "model.safetensors"
    left = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(PREFIX)}
    save_file(left, path, {"format": "pt"})
    assert not has_mtp(config_of(folder)), "a config that names one is not enough"


def test_only_of_one_layer(tmp_path: Path) -> None:
    folder = make_qwen_mtp(tmp_path, "qwen3_5_delta", num_layers=2)
    with pytest.raises(LoaderError, match="mtp_num_hidden_layers is 2: only heads of 1 layer are supported"):
        check_mtp(config_of(folder))
    assert not has_mtp(config_of(folder))
