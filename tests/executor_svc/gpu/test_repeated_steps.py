"""Steps whose launches are repeated: the tokens and logprobs of steps that are launched anew each time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cadenza_common.plan.result import StepResult
from cadenza_common.plan.sampling import SequenceSampling
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.repeating import repeat_launches
from tests.executor_svc.gpu.test_sampling_steps import assert_same
from tests.helpers.executor.plans import ints, scheduled, sequence
from tests.helpers.executor.stepping import Stepper

pytestmark = pytest.mark.slow
DRAWN = SequenceSampling(
    temperature=0.7, top_k=20, top_p=0.9, seed=3, num_logprobs=3, frequency_penalty=0.5, num_prompt_logprobs=1
)
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64},
    "glm4_moe": {"family": "glm4_moe", "num_hidden_layers": 2},
    "qwen3_5_delta": {
        "family": "qwen3_5_delta", "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip


def made(name: str, folder: Path) -> Path:
    options = {"num_hidden_layers": 1} | SHAPES[name]
    return make_checkpoint(folder, options.pop("family"), vocab_size=131, **options)


def rounds_of_steps(stepper: Stepper, count: int) -> Iterator[list[StepResult]]:
    """Three sequences, one in chunks beside another and one with all sampling, which begin anew in each round.

    Prompts differ from round to round, and lengths by a few tokens: sizes are padded to the same.
    """
    for index in range(count):
        first = list(range(3 + index, 28))
        prompts = [[5, 9, 2 + index], first, [7 + index] * (20 - index)]
        one, two, three = (
            sequence(
                slot, prompts[slot], stepper.blocks(slot), state_pages=stepper.state(slot),
                sampling=DRAWN if slot == 2 else SequenceSampling(),
            )
            for slot in range(3)
        )  # fmt: skip
        released = ints(0, 1, 2) if index else ints()
        yield [
            stepper.step(released_slots=released, admitted=(one,), scheduled=scheduled((0, 3, True))),
            stepper.step(admitted=(two,), scheduled=scheduled((1, 9, False)), decode_ready=True),
            stepper.step(scheduled=scheduled((1, len(first) - 9, True)), decode_ready=True),
            stepper.step(admitted=(three,), scheduled=scheduled((2, 20 - index, True)), decode_ready=True),
            stepper.step(decode_ready=True),
        ]


@pytest.mark.parametrize("name", SHAPES)
def test_repeated_steps_give_what_new_ones_give(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(name, tmp_path)
    expected = list(rounds_of_steps(Stepper(Model(folder, device="cuda", enforce_eager=True), num_slots=3), 3))
    assert expected[0] != expected[1]
    repeated = repeat_launches(monkeypatch)
    stepper = Stepper(Model(folder, device="cuda"), num_slots=3)
    (tried_at_start,) = repeated
    counts = []
    for results, others in zip(rounds_of_steps(stepper, 3), expected, strict=True):
        assert_same(results, others)
        counts.append(len(repeated))
    # Of the last round the hidden states, logits and rounds of three steps with prompts, and the rounds of others.
    assert counts[-1] - counts[-2] >= 9
    assert repeated.count(tried_at_start) > 3
