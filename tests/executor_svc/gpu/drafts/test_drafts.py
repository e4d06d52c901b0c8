"""Steps with drafts on the GPU's path, two in flight: the tokens, ends and logprobs of steps without drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza_common.plan.result import StepResult
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.cpu.kernels.suffixes.growth import SuffixKernels
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.gpu.sampling import state as gpu_sampling_state
from executor_svc.plan.limits import Limits
from executor_svc.speculation.drafts import DraftSource
from executor_svc.speculation.ngram import NgramSource
from executor_svc.speculation.suffix import SuffixSource
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.drafted_steps import (
    MAX_DRAFTS,
    PERIODIC,
    REQUESTS,
    WITH_DRAFTS,
    Outputs,
    make_model,
    note_device_calls,
    outputs,
)
from tests.helpers.executor.plans import columns, ints, scheduled, sequence
from tests.helpers.executor.stepping import Stepper
from tests.helpers.marks import short_and_long

SOURCES: dict[str, Callable[[Limits], DraftSource]] = {
    "ngram": NgramSource,
    "suffix": lambda limits: SuffixSource(limits, SuffixKernels()),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def cpu(folder: Path) -> Model:
    return Model(folder)


@pytest.fixture(scope="module")
def gpu(folder: Path) -> Model:
    return Model(folder, device="cuda")


@pytest.fixture(scope="module")
def expected(cpu: Model) -> Outputs:
    return outputs(Stepper(cpu, max_drafts=MAX_DRAFTS), 0)


@pytest.mark.parametrize(
    ("kind", "enforce_eager"),
    short_and_long([("ngram", False), ("ngram", True), ("suffix", False)], [("ngram", True)]),
)
def test_tokens_are_those_without_drafts(
    kind: str, enforce_eager: bool, folder: Path, gpu: Model, expected: Outputs
) -> None:
    model = Model(folder, device="cuda", enforce_eager=True) if enforce_eager else gpu
    found = outputs(Stepper(model, drafts=SOURCES[kind], **WITH_DRAFTS), MAX_DRAFTS)
    assert found.tokens == expected.tokens
    assert found.ended == expected.ended == set(range(len(REQUESTS)))
    assert found.top == expected.top
    for slot, logprobs in expected.logprobs.items():
        np.testing.assert_allclose(found.logprobs[slot], logprobs, atol=3e-5)
    assert found.num_accepted > 10


def tokens_by_slot(found: list[StepResult]) -> dict[int, list[int]]:
    tokens = defaultdict(list)
    for result in found:
        counts = result.num_tokens if len(result.num_tokens) else np.ones(len(result.slots), np.int64)
        for slot, token in zip(np.repeat(result.slots, counts).tolist(), result.token_ids.tolist(), strict=True):
            tokens[slot].append(token)
    return tokens


def ids_of_candidates(result: StepResult) -> dict[int, list[int]]:
    return {slot: list(each.token_ids) for slot, each in result.candidates.items()}


def test_slots_beside_those_with_drafts(cpu: Model, gpu: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beam, lists that only the host has, a prompt with logprobs, in which step nobody has drafts, none allowed."""
    monkeypatch.setattr(gpu_sampling_state, "LIST_CAPACITY", 2)
    biased = SequenceSampling(
        bias_token_ids=ints(3, 7, 9), biases=np.array([2.0, 90.0, 3.0], np.float32), num_logprobs=1
    )
    same = SequenceSampling(allowed_token_ids=ints(7))
    beam, asking = SequenceSampling(num_candidates=4), SequenceSampling(num_prompt_logprobs=2)
    admitted = [
        sequence(0, [5, 9, 2], Stepper.blocks(0), sampling=beam),
        sequence(1, [7] * 12, Stepper.blocks(1), sampling=same, max_drafts=3),
        sequence(2, [7] * 12, Stepper.blocks(2), sampling=biased, max_drafts=3),
        sequence(3, PERIODIC, Stepper.blocks(3)),
        sequence(4, [4] * 8, Stepper.blocks(4), sampling=asking, max_drafts=3),
    ]
    plans: list[dict[str, Any]] = [
        {
            "admitted": tuple(admitted[:4]),
            "scheduled": scheduled((0, 3, True), *((slot, 12, True) for slot in (1, 2, 3))),
        },
        {"given": columns((0, 9)), "decode_ready": True, "max_drafts": 3},
        {"admitted": (admitted[4],), "scheduled": scheduled((4, 8, True)), "decode_ready": True, "max_drafts": 3},
        {"given": columns((0, 50)), "decode_ready": True, "max_drafts": 2},
        {"released_slots": ints(0, 2), "decode_ready": True, "max_drafts": 1},
    ]
    stepper = Stepper(gpu, drafts=NgramSource, **WITH_DRAFTS)
    found = [stepper.step(**fields) for fields in plans]
    stepper = Stepper(cpu, max_drafts=3)
    # Steps more than the plans: of these sequences one token each.
    expected = [stepper.step(**{**fields, "max_drafts": 0}) for fields in (*plans, *[{"decode_ready": True}] * 10)]
    drafted = [dict(zip(each.slots.tolist(), each.num_drafts.tolist(), strict=False)) for each in found]
    assert [{slot for slot, count in counts.items() if count} <= {1, 4} for counts in drafted] == [True] * 5
    assert sum(drafted[1].values()) > 0
    assert not drafted[2]
    tokens, wanted = tokens_by_slot(found), tokens_by_slot(expected)
    assert {slot: wanted[slot][: len(each)] for slot, each in tokens.items()} == tokens
    assert len(tokens[1]) > 5
    for one, other in zip(found, expected, strict=False):
        assert ids_of_candidates(one) == ids_of_candidates(other)
        assert one.prompt_logprobs.keys() == other.prompt_logprobs.keys()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 3, "top_k": 5}], ids=["greedy", "drawn"])
def test_the_same_decodes_with_drafts_send_nothing_and_are_two_graphs(
    sampling: dict[str, Any], cpu: Model, gpu: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, replayed = note_device_calls(monkeypatch)
    stepper = Stepper(gpu, drafts=NgramSource, **WITH_DRAFTS)
    first = sequence(0, PERIODIC, Stepper.blocks(0), max_drafts=3)
    second = sequence(1, [8, 9] * 3, Stepper.blocks(1), sampling=SequenceSampling(**sampling), max_drafts=2)
    begin = {"admitted": (first, second), "scheduled": scheduled((0, 12, True), (1, 6, True))}
    found = [stepper.step(**begin)]
    replayed.clear()
    numbers = []
    for _ in range(4):
        sent.clear()
        found.append(result := stepper.step(decode_ready=True, max_drafts=2))
        numbers.append(len(sent))
        assert result.num_computed == 2 + sum(result.num_drafts)
    assert numbers == [1, 0, 0, 0]
    # Of 1 or 3 drafts, for 2 sequences: once for the tokens' logits, once for the choices.
    assert replayed == [StepSizes.decode(2, 3)] * 8
    stepper.step(decode_ready=True, max_drafts=1)
    assert replayed[8:] == [StepSizes.decode(2, 1)] * 2
    stepper = Stepper(cpu, max_drafts=3)
    expected = tokens_by_slot([stepper.step(**begin), *(stepper.step(decode_ready=True) for _ in range(12))])
    assert all(expected[slot][: len(tokens)] == tokens for slot, tokens in tokens_by_slot(found).items())


def test_results_are_those_of_the_cpu_with_the_same_drafts(cpu: Model, gpu: Model) -> None:
    """Counts and states of slots too, in steps of which each knows all tokens before it; blocks come as they must."""
    repeat = SequenceSampling(
        temperature=0.5, seed=3, allowed_token_ids=ints(7, 8), stop_token_ids=ints(8), min_tokens=9
    )
    first = sequence(0, [7] * 6, [0], sampling=repeat, max_drafts=3, max_len=30)
    second = sequence(1, PERIODIC, [16, 17], max_drafts=2, max_len=40)
    plans: list[dict[str, Any]] = [{"admitted": (first, second), "scheduled": scheduled((0, 6, True), (1, 12, True))}]
    plans += [{"decode_ready": True, "max_drafts": most, "appends": columns()} for most in (3, 1, 2, 3, 0, 3, 3, 3)]
    plans[2]["appends"], plans[3]["appends"], plans[5]["appends"] = columns((0, 1)), columns((1, 18)), columns((0, 2))
    on_both = []
    for model in (cpu, gpu):
        stepper = Stepper(model, drafts=NgramSource, **WITH_DRAFTS)
        on_both.append([stepper.step(debug_digest=True, **fields) for fields in plans])
    for here, there in zip(*on_both, strict=True):
        for name in ("slots", "num_tokens", "token_ids", "num_drafts", "num_accepted"):
            assert getattr(there, name).tolist() == getattr(here, name).tolist(), name
        assert (there.num_sequences, there.num_computed) == (here.num_sequences, here.num_computed)
        assert there.debug_digest == here.debug_digest
    assert sum(sum(result.num_accepted) for result in on_both[0]) > 3
