"""All sampling and logprobs that a step supports, one step ahead of the host: the same results as the CPU's path."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from cadenza_common.plan.result import LogprobColumns, SlotError, StepResult
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.gpu.enqueued_step import GpuStep
from executor_svc.gpu.sampling import state as gpu_sampling_state
from executor_svc.gpu.sampling.state import ListRanges
from executor_svc.gpu.step import GpuStepExecutor
from executor_svc.worker.worker import Launched
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.helpers.executor.plans import columns, ints, plan, scheduled, sequence
from tests.helpers.executor.stepping import Stepper

VOCAB = 131
PROMPTS = ([5, 9, 2], list(range(3, 40)), [7] * 20)
Plans = Sequence[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("llama"), "llama", vocab_size=VOCAB, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=1, head_dim=64,
    )  # fmt: skip


@pytest.fixture(scope="module")
def cpu(folder: Path) -> Model:
    return Model(folder)


@pytest.fixture(scope="module")
def gpu(folder: Path) -> Model:
    return Model(folder, device="cuda")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps had been enqueued each time that a launch waited for all of them."""
    found: list[int] = []
    settle = GpuStepExecutor.settle_until

    def counted(self: GpuStepExecutor, last: GpuStep | None) -> None:
        if last is None:
            found.append(len(self._pending))
        settle(self, last)

    monkeypatch.setattr(GpuStepExecutor, "settle_until", counted)
    return found


def results(model: Model, plans: Plans) -> list[StepResult]:
    """What the plans give, each launched before the result of the one before it is read."""
    stepper, begun, found = Stepper(model), deque[Launched](), []
    for step_id, fields in enumerate(plans, 1):
        begun.append(stepper.executor.launch(plan(step_id=step_id, **fields), 0))
        if len(begun) == 2:
            found.append(begun.popleft().result())
    return [*found, begun.popleft().result()]


def tokens_of(found: list[StepResult]) -> list[list[tuple[int, int]]]:
    """(slot, token) of each result; slots whose stop the planner did not know of are reported without a token."""
    pairs = []
    for result in found:
        counts = result.num_tokens if len(result.num_tokens) else np.ones(len(result.slots), np.int64)
        pairs.append(list(zip(np.repeat(result.slots, counts).tolist(), result.token_ids.tolist(), strict=True)))
    return pairs


def assert_same_logprobs(found: dict[int, LogprobColumns], expected: dict[int, LogprobColumns]) -> None:
    assert list(found) == list(expected)
    for one, other in zip(found.values(), expected.values(), strict=True):
        assert (one.start, one.num_top) == (other.start, other.num_top)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=3e-5)
        np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, atol=3e-5)
        np.testing.assert_array_equal(one.ranks, other.ranks)
        np.testing.assert_array_equal(one.top_token_ids, other.top_token_ids)


def assert_same(found: list[StepResult], expected: list[StepResult]) -> None:
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.error_slots.tolist() == other.error_slots.tolist()
        assert one.errors == other.errors
        assert_same_logprobs(one.logprobs, other.logprobs)
        assert_same_logprobs(one.prompt_logprobs, other.prompt_logprobs)
        assert list(one.candidates) == list(other.candidates)
        for few, others in zip(one.candidates.values(), other.candidates.values(), strict=True):
            assert few.token_ids.tolist() == others.token_ids.tolist()
            np.testing.assert_allclose(few.logprobs, others.logprobs, atol=3e-5)


# --- random requests ------------------------------------------------------------------------------------------------


def random_sampling(rng: np.random.Generator) -> SequenceSampling:
    """Any mixture of parameters, each off half of the time."""

    def maybe(make: Callable[[], Any], off: Any) -> Any:
        return make() if rng.random() < 0.5 else off

    def some_ids(least: int, most: int) -> np.ndarray:
        return rng.permutation(VOCAB)[: rng.integers(least, most)]

    bias_ids = maybe(lambda: some_ids(1, 9), ints())
    return SequenceSampling(
        temperature=maybe(lambda: float(rng.choice([0.3, 0.8, 1.5])), 0.0),
        top_p=maybe(lambda: 0.8, 1.0),
        top_k=maybe(lambda: int(rng.integers(1, 40)), 0),
        min_p=maybe(lambda: 0.05, 0.0),
        top_n_sigma=maybe(lambda: 1.5, 0.0),
        repetition_penalty=maybe(lambda: 1.3, 1.0),
        presence_penalty=maybe(lambda: 0.4, 0.0),
        frequency_penalty=maybe(lambda: -0.3, 0.0),
        seed=int(rng.integers(1 << 62)),
        stop_token_ids=maybe(lambda: some_ids(1, 30), ints()),
        min_tokens=maybe(lambda: int(rng.integers(1, 5)), 0),
        num_logprobs=maybe(lambda: int(rng.integers(0, 20)), None),
        num_prompt_logprobs=maybe(lambda: int(rng.integers(0, 4)), None),
        bias_token_ids=bias_ids,
        biases=rng.normal(size=len(bias_ids)).astype(np.float32) * 3,
        allowed_token_ids=maybe(lambda: some_ids(20, VOCAB), ints()),
        bad_words=maybe(lambda: tuple(some_ids(1, 3) for _ in range(5)), ()),
    )


def random_plans(seed: int, num_steps: int) -> Plans:
    """Sequences that come and go; each is computed whole, then sampled from for some steps."""
    rng = np.random.default_rng(seed)
    left, plans = dict[int, int](), []
    for _ in range(num_steps):
        released = [slot for slot, steps in left.items() if steps == 0]
        left = {slot: steps - 1 for slot, steps in left.items() if steps > 0}
        admitted = []
        for slot in range(4):
            if slot not in left and rng.random() < 0.7:
                tokens = rng.integers(0, VOCAB, rng.integers(1, 30)).tolist()
                blocks = Stepper.blocks(slot)
                admitted.append(sequence(slot, tokens, blocks, sampling=random_sampling(rng)))
                left[slot] = int(rng.integers(0, 6))
        fields: dict[str, Any] = {"admitted": tuple(admitted), "released_slots": ints(*released), "decode_ready": True}
        if admitted:
            fields["scheduled"] = scheduled(*((one.slot, len(one.token_ids), True) for one in admitted))
        plans.append(fields)
    return plans


@pytest.mark.long
def test_random_requests_never_wait_for_the_host(cpu: Model, gpu: Model, waits: list[int]) -> None:
    plans = random_plans(1, 12)
    expected = results(cpu, plans)
    assert sum(map(len, tokens_of(expected))) > 20
    assert_same(results(gpu, plans), expected)
    assert waits == []


def test_lists_that_do_not_fit_stay_on_the_host(
    cpu: Model, gpu: Model, waits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = random_plans(4, 10)
    expected = results(cpu, plans)
    monkeypatch.setattr(gpu_sampling_state, "LIST_CAPACITY", 16)
    assert_same(results(gpu, plans), expected)
    assert waits


def test_ranges_of_lists_are_used_again() -> None:
    ranges = ListRanges(10)
    assert [ranges.take(0, 4), ranges.take(1, 4), ranges.take(2, 0)] == [0, 4, 0]
    assert ranges.take(3, 3) is None
    assert ranges.take(0, 2) == 0
    assert ranges.take(3, 2) == 2
    ranges.free(ints(1, 2))
    assert ranges.take(4, 6) == 4
    assert ranges.take(1, 1) is None


# --- what is rarer --------------------------------------------------------------------------------------------------


def test_prompt_logprobs_in_chunks_and_pieces(cpu: Model, gpu: Model, waits: list[int]) -> None:
    """Pieces are of as many rows as there are sequences, 8 here; the last chunk reports no token of the prompt."""
    asking = SequenceSampling(num_prompt_logprobs=3, num_logprobs=1)
    first, other = sequence(0, PROMPTS[1], Stepper.blocks(0), sampling=asking), sequence(1, [4, 4], Stepper.blocks(1))
    plans: Plans = [
        {"admitted": (first, other), "scheduled": scheduled((0, 19, False), (1, 2, True))},
        {"scheduled": scheduled((0, 17, False)), "decode_ready": True},
        {"scheduled": scheduled((0, 1, True)), "decode_ready": True},
        {"decode_ready": True},
    ]
    expected = results(cpu, plans)
    assert [len(item.logprobs) for result in expected for item in result.prompt_logprobs.values()] == [19, 17]
    assert_same(results(gpu, plans), expected)
    assert waits == []


def test_beams_beside_samples(cpu: Model, gpu: Model) -> None:
    """Candidates by edited logits, twice, then given tokens; samples of one prompt with penalties; a plain sequence."""
    beam = SequenceSampling(num_candidates=4, bias_token_ids=ints(9, 70), biases=np.array([5.0, -5.0], np.float32))
    sample = SequenceSampling(temperature=0.9, seed=3, frequency_penalty=0.7, num_logprobs=2)
    twin = SequenceSampling(temperature=0.9, seed=3, sample_index=1, presence_penalty=0.7)
    wishes = {0: (PROMPTS[0], beam), 1: (PROMPTS[1], sample), 2: (PROMPTS[1], twin), 3: (PROMPTS[2], beam)}
    made = [sequence(i, each, Stepper.blocks(i), sampling=wish) for i, (each, wish) in wishes.items()]
    plain = sequence(4, PROMPTS[2], Stepper.blocks(4))
    plans: Plans = [
        {"admitted": (*made[:1], made[3], plain), "scheduled": scheduled((0, 3, True), (3, 20, True), (4, 20, True))},
        {"admitted": tuple(made[1:3]), "forks": columns((2, 1)), "scheduled": scheduled((1, 37, True))},
        {"given": columns((0, 9), (3, 50)), "held_slots": ints(2), "decode_ready": True},
        {"decode_ready": True},
    ]
    expected = results(cpu, plans)
    assert [len(result.candidates) for result in expected] == [2, 0, 2, 0]
    assert_same(results(gpu, plans), expected)


def test_a_prompt_without_finite_logits_fails_its_own_sequence(folder: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    asking = SequenceSampling(num_prompt_logprobs=1)
    bad, good = (
        sequence(0, [5, 77, 3, 3, 3], Stepper.blocks(0), sampling=asking),
        sequence(1, [8, 9], Stepper.blocks(1), sampling=asking),
    )
    plans: Plans = [
        {"admitted": (bad, good), "scheduled": scheduled((0, 4, False), (1, 2, True))},
        {"scheduled": scheduled((0, 1, True)), "decode_ready": True},
        {"decode_ready": True},
    ]
    for options in ({}, {"device": "cuda"}):
        found = results(Model(broken, **options), plans)
        assert [result.error_slots.tolist() for result in found] == [[], [0], []]
        assert found[1].errors == (SlotError.NON_FINITE_LOGITS,)
        assert [[slot for slot, _ in pairs] for pairs in tokens_of(found)] == [[1], [1], [1]]


def test_times_are_reported_by_part(gpu: Model) -> None:
    (found,) = results(
        gpu, [{"admitted": (sequence(0, [1, 2], Stepper.blocks(0)),), "scheduled": scheduled((0, 2, True))}]
    )
    assert found.timings.device_ns > 0
    assert found.timings.sample_ns > 0
    assert found.timings.total_ns >= found.timings.device_ns + found.timings.sample_ns
