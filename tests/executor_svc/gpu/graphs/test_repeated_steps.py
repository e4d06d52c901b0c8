"""Steps whose launches are repeated: the tokens and logprobs of steps that are launched anew each time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza_common.plan.result import StepResult
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.gpu.launches.repeated import RepeatedParts
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.drafted_steps import outputs
from tests.executor_svc.gpu.drafts.test_heads import on_both
from tests.executor_svc.gpu.repeating import repeat_launches
from tests.executor_svc.gpu.runner.test_adapters import SIZES, Run, mixed, save_adapters
from tests.executor_svc.gpu.test_sampling_steps import assert_same
from tests.helpers.executor.plans import ints, scheduled, sequence
from tests.helpers.executor.stepping import Stepper
from tests.helpers.marks import short_and_long
from tests.helpers.models.mtp_heads import ReferenceMtp, make_mimo

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


@pytest.mark.parametrize("name", short_and_long(SHAPES, ["qwen3_5_delta"]))
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


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the parts whose launches are repeated, as they will be."""
    found: set[str] = set()
    run = RepeatedParts.run

    def noted(self: RepeatedParts, part: Any, enqueue: Any) -> None:
        if self._parts.get((part, 0)) is not None:
            found.add(part[0])
        run(self, part, enqueue)

    monkeypatch.setattr(RepeatedParts, "run", noted)
    return found


def test_repeated_steps_have_the_adapters_of_their_slots(
    parts: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the same on one executor; between them slots of other adapters."""
    folder = made("llama", tmp_path)
    adapters = save_adapters(folder, tmp_path / "adapters")
    expected = Run(Model(folder, SIZES, device="cuda", enforce_eager=True), adapters)
    mixed(expected)
    repeat_launches(monkeypatch)
    run = Run(Model(folder, SIZES, device="cuda"), adapters)
    for index in range(3):
        if index:
            run.step(released_slots=ints(0, 2, 3, 4))
        mixed(run)
        assert run.tokens == expected.tokens
        for slot, rows in expected.logprobs.items():
            np.testing.assert_allclose(run.logprobs[slot], rows, atol=1e-4)
    assert parts == {"probe", "hidden", "logits", "rounds"}


@pytest.mark.long
def test_repeated_rows_and_passes_of_a_head_give_the_same_drafts(
    parts: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_mimo(tmp_path, predicts=True, num_hidden_layers=1)

    def reference() -> ReferenceMtp:
        return ReferenceMtp(tmp_path)

    expected = outputs(on_both(tmp_path, None, reference, num_cpu_blocks=8, enforce_eager=True).stepper(), 3)
    repeat_launches(monkeypatch)
    found = outputs(on_both(tmp_path, None, reference, num_cpu_blocks=8).stepper(), 3)
    assert found.tokens == expected.tokens
    assert (found.num_drafts, found.num_accepted) == (expected.num_drafts, expected.num_accepted)
    assert found.num_accepted > 3
    assert {"hidden", "head", "passes", "rounds"} <= parts
