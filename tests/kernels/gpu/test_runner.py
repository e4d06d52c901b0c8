"""The whole runner on the GPU's kernels, graphs aside: the tokens of the CPU's path, whatever a step holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor_svc.plan import SequenceSampling
from tests.checkpoints import make_checkpoint
from tests.helpers.plans import scheduled, sequence
from tests.helpers.stepping import Stepper
from tests.kernels.driver import Model
from tests.kernels.gpu.attention_cases import working_interpreter

SHAPES: dict[str, dict[str, Any]] = {
    "llama, group 4": {"family": "llama", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64},
    "qwen3, norms of heads": {"family": "qwen3", "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64},
}
PROMPTS = ([5, 9, 2], list(range(3, 40)), [7] * 20)


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = dict(SHAPES[request.param])
    return make_checkpoint(
        tmp_path_factory.mktemp("model"), options.pop("family"), vocab_size=131, num_hidden_layers=2, **options
    )


@pytest.fixture(autouse=True)
def _interpreter() -> Iterator[None]:
    with working_interpreter():
        yield


def tokens_of(model: Model) -> list[list[int]]:
    """Three sequences: one alone, one in chunks beside it, one that comes later and is drawn."""
    stepper = Stepper(model)
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def step(**fields: Any) -> None:
        result = stepper.step(**fields)
        counts = result.num_tokens if len(result.num_tokens) else [1] * len(result.slots)
        tokens = iter(result.token_ids.tolist())
        for slot, count in zip(result.slots.tolist(), counts, strict=True):
            found[slot] += [next(tokens) for _ in range(count)]

    first, second, third = (sequence(i, prompt, stepper.blocks(i)) for i, prompt in enumerate(PROMPTS))
    step(admitted=(first,), scheduled=scheduled((0, 3, True)))
    step(admitted=(second,), scheduled=scheduled((1, 20, False)), decode_ready=True)
    step(scheduled=scheduled((1, 17, True)), decode_ready=True)
    drawn = SequenceSampling(temperature=0.7, top_k=20, seed=3)
    third = sequence(2, PROMPTS[2], stepper.blocks(2), sampling=drawn)
    step(admitted=(third,), scheduled=scheduled((2, 20, True)), decode_ready=True)
    for _ in range(6):
        step(decode_ready=True)
    return [found[i] for i in range(3)]


def test_tokens_are_those_of_the_cpu(folder: Path) -> None:
    expected = tokens_of(Model(folder))
    assert [len(each) for each in expected] == [10, 8, 7]
    assert tokens_of(Model(folder, device="cuda", numerics="fast")) == expected
