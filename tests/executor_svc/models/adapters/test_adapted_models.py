"""Models with adapters that peft made: peft's logits, and the bits of a row alone in batches of several adapters."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_svc.models.adapters.places import AdapterSizes
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.executor_svc.cpu.kernels.bits import equal_bits
from tests.executor_svc.driver import Driver, Model, Tokens
from tests.helpers.peft_adapters import read, save_peft_adapter

PLACES, MAX_RANK = 4, 64
KINDS: dict[str, dict[str, Any]] = {
    "all, rank 8": {"r": 8, "lora_alpha": 12, "target_modules": "all-linear"},
    "ranks 1 to 64": {
        "r": 16,
        "lora_alpha": 3,
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 1, "qkv_proj": 5, "v_proj": 3, "o_proj": 64, "down_proj": 17, "up_proj": 33},
    },
    "a layer": {"r": 2, "target_modules": ["q_proj", "qkv_proj", "down_proj"], "layers_to_transform": [1]},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the tiny checkpoint of a family."""
    return cache(lambda family: make_checkpoint(tmp_path_factory.mktemp(family), family))


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, 131) for _ in range(length)]


def small(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose products stay near 1, so that logits of random adapters have the base's size."""
    return {"lora_alpha": 1, **config}


def logits_of(driver: Driver, place: int, tokens: list[int], chunk: int = 64) -> Tensor:
    """Return the logits of a sequence that runs alone."""
    sequence, rows = Tokens(tokens, place=place), []
    while sequence.num_computed < len(tokens):
        rows.append(driver.step([(sequence, min(chunk, len(tokens) - sequence.num_computed))])[0])
    driver.release(sequence)
    driver.forget()
    return torch.cat(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_peft(checkpoint: Callable[[str], Path], family: str, tmp_path: Path) -> None:
    """In fp32, beside peft's unmerged model in float64, within 1e-5 of the largest logit."""
    base = checkpoint(family)
    model = Model(base, AdapterSizes(PLACES, MAX_RANK), dtype="float32")
    adapters, driver = model.loaded.adapters, model.driver(block_size=8)
    assert adapters is not None
    tokens = prompt(0, 40)
    without = logits_of(driver, -1, tokens)
    assert equal_bits(without, Model(base, dtype="float32").whole(tokens))
    for place, (name, config) in enumerate(KINDS.items()):
        peft = save_peft_adapter(base, tmp_path / str(place), seed=place, **config)
        adapters.load(place, read(base, tmp_path / str(place)))
        with torch.no_grad():
            expected = peft(torch.tensor([tokens])).logits[0]
        found = logits_of(driver, place, tokens)
        worst = float((found.double() - expected).abs().max() / expected.abs().max())
        assert worst <= 1e-5, name
        assert float((found - without).abs().max()) > 1e-2 * float(without.abs().max())
    assert equal_bits(logits_of(driver, -1, tokens), without)
