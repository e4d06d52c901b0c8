"""The whole runner on the GPU's kernels, graphs aside: the tokens of the CPU's path, whatever a step holds."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from cadenza_common.plan.result import StepResult
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.gpu import runner as gpu_runner
from executor_svc.gpu.graphs import DirectReplayer
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.worker.worker import Launched
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.helpers.executor.plans import ints, plan, scheduled, sequence
from tests.helpers.executor.stepping import Stepper

SHAPES: dict[str, dict[str, Any]] = {
    "llama, group 4": {"family": "llama", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64},
    "qwen3, norms of heads": {"family": "qwen3", "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64},
}
PROMPTS = ([5, 9, 2], list(range(3, 40)), [7] * 20)


def made(name: str, folder: Path) -> Path:
    options = dict(SHAPES[name])
    return make_checkpoint(folder, options.pop("family"), vocab_size=131, num_hidden_layers=2, **options)


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("llama, group 4", tmp_path_factory.mktemp("llama"))


class Collected:
    """Tokens by slot, as results report them."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def add(self, result: StepResult) -> None:
        counts = result.num_tokens if len(result.num_tokens) else [1] * len(result.slots)
        tokens = iter(result.token_ids.tolist())
        for slot, count in zip(result.slots.tolist(), counts, strict=True):
            self.tokens.setdefault(slot, []).extend(next(tokens) for _ in range(count))


def on_gpu(folder: Path, **options: Any) -> Model:
    return Model(folder, device="cuda", **options)


def mixed_steps(model: Model) -> dict[int, list[int]]:
    """Three sequences: one alone, one in chunks beside it, one that comes later and is drawn."""
    stepper, collected = Stepper(model), Collected()
    drawn = SequenceSampling(temperature=0.7, top_k=20, top_p=0.9, seed=3)
    first, second = (sequence(i, PROMPTS[i], stepper.blocks(i)) for i in (0, 1))
    third = sequence(2, PROMPTS[2], stepper.blocks(2), sampling=drawn)
    collected.add(stepper.step(admitted=(first,), scheduled=scheduled((0, 3, True))))
    collected.add(stepper.step(admitted=(second,), scheduled=scheduled((1, 20, False)), decode_ready=True))
    collected.add(stepper.step(scheduled=scheduled((1, 17, True)), decode_ready=True))
    collected.add(stepper.step(admitted=(third,), scheduled=scheduled((2, 20, True)), decode_ready=True))
    collected.add(stepper.step(decode_ready=True))
    return collected.tokens


def test_tokens_are_those_of_the_cpu(folder: Path) -> None:
    expected = mixed_steps(Model(folder))
    assert [len(expected[i]) for i in range(3)] == [5, 3, 2]
    assert mixed_steps(on_gpu(folder)) == expected


def test_without_graphs_tokens_are_the_same(llama: Path) -> None:
    assert mixed_steps(on_gpu(llama, enforce_eager=True)) == mixed_steps(Model(llama))


def test_steps_are_begun_before_the_last_is_known(llama: Path) -> None:
    """The second of two sequences stops in a step while the next has begun; its slot is given to another at once."""
    reference = Stepper(Model(llama))
    first, second = (sequence(i, PROMPTS[i], reference.blocks(i)) for i in (0, 1))
    alone, ahead = Collected(), Collected()
    opening: dict[str, Any] = {"admitted": (first, second), "scheduled": scheduled((0, 3, True), (1, 37, True))}
    alone.add(reference.step(**opening))
    for _ in range(6):
        alone.add(reference.step(decode_ready=True))
    stop = alone.tokens[1][2]
    assert stop not in alone.tokens[1][:2]

    stepper = Stepper(on_gpu(llama))
    stopping = SequenceSampling(stop_token_ids=ints(stop))
    second = sequence(1, PROMPTS[1], stepper.blocks(1), sampling=stopping)
    third = sequence(1, PROMPTS[2], stepper.blocks(2))
    plans: list[dict[str, Any]] = [{"admitted": (first, second), "scheduled": scheduled((0, 3, True), (1, 37, True))}]
    plans += [{"decode_ready": True}] * 4
    # Step 3 stops slot 1. Step 4 has begun by then; step 6 is made by somebody who knows.
    plans.append({"released_slots": ints(1), "admitted": (third,), "scheduled": scheduled((1, 20, True))})
    plans[-1]["decode_ready"] = True
    begun: deque[Launched] = deque()
    for step_id, fields in enumerate(plans, 1):
        begun.append(stepper.executor.launch(plan(step_id=step_id, **fields), 0))
        if len(begun) == 2:
            ahead.add(begun.popleft().result())
    ahead.add(begun.popleft().result())
    assert ahead.tokens[0] == alone.tokens[0][:6]
    assert ahead.tokens[1][:3] == alone.tokens[1][:3]
    fresh = Stepper(Model(llama))
    third = sequence(1, PROMPTS[2], fresh.blocks(2))
    (token,) = fresh.step(admitted=(third,), scheduled=scheduled((1, 20, True))).token_ids.tolist()
    assert ahead.tokens[1][3:] == [token]
    # The mirror is where the slots of the CPU would be.
    assert stepper.executor.slots.num_tokens[:2].tolist() == [3 + 6, 20 + 1]
    assert stepper.executor.slots.num_computed_tokens[:2].tolist() == [3 + 5, 20]


def test_decodes_without_a_graph_take_none_of_steps_with_prompts(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[StepSizes] = []

    class Noting(DirectReplayer):
        def replay(self, sizes: StepSizes) -> None:
            replayed.append(sizes)
            super().replay(sizes)

    both = StepSizes(2, 2, 0, 0)
    monkeypatch.setattr(gpu_runner, "mixed_sizes", lambda *_: [both])
    monkeypatch.setattr(gpu_runner, "DirectReplayer", Noting)
    monkeypatch.setattr(gpu_runner, "CudaGraphs", Noting)
    stepper = Stepper(on_gpu(llama))
    first, second = sequence(0, PROMPTS[0], stepper.blocks(0)), sequence(1, [7], stepper.blocks(1))
    stepper.step(admitted=(first,), scheduled=scheduled((0, 2, False)))
    assert replayed.pop() == both
    stepper.step(admitted=(second,), scheduled=scheduled((0, 1, False), (1, 1, True)))
    assert not replayed
