"""Models whose operations are compared, and kernels that are wrong; for tests only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.gpu.checks.model_check import ModelCheck
from executor_svc.gpu.choices.store import CheckStore
from executor_svc.gpu.choices.ways import KernelChecks
from executor_svc.models.adapters.places import AdapterSizes
from tests.executor_svc.driver import Model, Tokens

HEADS = {"num_hidden_layers": 1, "head_dim": 64}


def model_check(model: Model, folder: Path | None = None, long: int = 40, reports: bool = False) -> ModelCheck:
    """long: of a prompt whose decodes are split from 130 tokens on."""
    checks = KernelChecks(model.device.torch_device, CheckStore(folder, {"gpu": "none"}), reports=reports)
    return ModelCheck(model.loaded, model.device, ExecutorConfig(**model.options), checks, long=long)


def loaded(folder: Path, adapter_sizes: AdapterSizes | None = None, **options: Any) -> Model:
    return Model(folder, adapter_sizes, device="cuda", **{"dtype": "bfloat16", "quantization": "int8"} | options)


def logits_of(model: Model) -> Tensor:
    """Of a prompt, a chunk after it, and a decode."""
    driver, sequence = model.driver(), Tokens([(7 * each) % 131 for each in range(40)])
    return torch.cat([each for count in (21, 18, 1) for each in driver.step([(sequence, count)])])


def assert_same_tokens(found: Tensor, expected: Tensor) -> None:
    """Or tokens that are as likely, but for roundings to bfloat16, by which a right operation may differ."""
    assert (found - expected).norm() < 0.02 * expected.norm()
    chosen = expected.gather(-1, found.argmax(-1, keepdim=True))[:, 0]
    assert (expected.max(-1).values - chosen < 0.1).all()
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.8


def scaled(launch: Any, place: int) -> Any:
    """A launch whose result, one of its arguments, is off by 3%."""

    def wrong(*args: Any, **named: Any) -> None:
        launch(*args, **named)
        args[place].mul_(1.03)

    return wrong


def refused(*_: Any, **__: Any) -> None:
    raise RuntimeError("PassManager::run failed")
