"""Grammars of slots whose tokens the device samples: the CPU's tokens, whichever rows are late."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.plan.result import SlotError, StepResult
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.gpu.sampling.rounds import SamplingRounds
from executor_svc.startup.grammars import find_grammars
from executor_svc.worker.worker import Launched
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.test_sampling_steps import assert_same
from tests.helpers.executor.plans import columns, ints, plan, scheduled, sequence
from tests.helpers.executor.stepping import Stepper

VOCAB = 300
DIGITS = [ord(each) - ord("!") + 5 for each in "0123456789"]
LETTERS = GrammarSpec("regex", "[ab]{2,20}")
Plans = Sequence[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("llama"), "llama", vocab_size=VOCAB, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=1, head_dim=64, tokenizer=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def cpu(folder: Path) -> Model:
    return Model(folder)


@pytest.fixture(scope="module")
def gpu(folder: Path) -> Model:
    return Model(folder, device="cuda")


def results(model: Model, plans: Plans, late: Collection[tuple[int, int]] = ()) -> list[StepResult]:
    """What the plans give, each launched before the result of the one before it is read.

    late: (step, slot) of rows whose masks are late, as a replay says it; no others are.
    """
    grammars = find_grammars(model.loaded)
    assert grammars is not None
    executor = Stepper(model, grammars=grammars).executor
    begun, found = deque[Launched](), []
    for step_id, fields in enumerate(plans, 1):
        executor.grammars.recorded = lambda slot, step_id=step_id: (step_id, slot) in late
        begun.append(executor.launch(plan(step_id=step_id, **fields), 0))
        if len(begun) == 2:
            found.append(begun.popleft().result())
    return [*found, begun.popleft().result()]


def outputs(found: Sequence[StepResult]) -> dict[int, list[int]]:
    """All tokens of each slot."""
    tokens = defaultdict[int, list[int]](list)
    for result in found:
        counts = result.num_tokens if len(result.num_tokens) else np.ones(len(result.slots), np.int64)
        for slot, token in zip(np.repeat(result.slots, counts).tolist(), result.token_ids.tolist(), strict=True):
            tokens[slot].append(token)
    return tokens


def admitted() -> tuple[Any, ...]:
    """Greedy, drawn, free, with other constraints, and one that no token is left for."""
    number = GrammarSpec("regex", "-?[0-9]{9,20}")
    drawn = {"temperature": 1.2, "seed": 5, "num_logprobs": 2}
    return (
        sequence(0, [5, 9, 7], Stepper.blocks(0), grammar=GrammarSpec("json_object")),
        sequence(1, [5, 9], Stepper.blocks(1), grammar=number, sampling=SequenceSampling(top_k=50, **drawn)),
        sequence(2, [8] * 12, Stepper.blocks(2), sampling=SequenceSampling(**drawn)),
        sequence(
            3, [11, 12], Stepper.blocks(3), grammar=number,
            sampling=SequenceSampling(
                repetition_penalty=1.3, allowed_token_ids=ints(*DIGITS[:5], 1), bad_words=(ints(DIGITS[2]),)
            ),
        ),
        sequence(
            4, [20], Stepper.blocks(4), grammar=number,
            sampling=SequenceSampling(allowed_token_ids=ints(200, 201)),
        ),
        sequence(
            5, [21, 22], Stepper.blocks(5), grammar=GrammarSpec("choices", choices=("no",), start_after_token_ids=(7,)),
            sampling=SequenceSampling(bias_token_ids=ints(7), biases=np.full(1, 50, np.float32)),
        ),
    )  # fmt: skip


def plans(num_steps: int) -> Plans:
    first = admitted()
    prompts = scheduled(*((each.slot, len(each.token_ids), True) for each in first))
    return [{"admitted": first, "scheduled": prompts, "decode_ready": True}, *[{"decode_ready": True}] * num_steps]


def test_tokens_are_those_of_the_cpu(cpu: Model, gpu: Model) -> None:
    expected = results(cpu, plans(8))
    found = results(gpu, plans(8))
    assert_same(found, expected)
    tokens = outputs(found)
    assert set(tokens[3]) <= {DIGITS[each] for each in (0, 1, 3, 4)} | {1}
    assert len(tokens[3]) == 9
    assert 4 not in tokens
    assert found[0].errors == (SlotError.GRAMMAR,)
    assert tokens[5][0] == 7


def test_a_step_is_launched_ahead_of_its_masks(gpu: Model) -> None:
    """Its model needs no mask, and the token that a mask follows from is on the device."""
    grammars = find_grammars(gpu.loaded)
    assert grammars is not None
    executor = Stepper(gpu, grammars=grammars).executor
    steps = [executor.launch(plan(step_id=index, **fields), 0) for index, fields in enumerate(plans(1), 1)]
    assert [step.waits_for_masks for step in steps] == [False, True]
    steps[0].result()
    for held in executor.grammars._slots.values():
        held.work.result(30)
    steps[1].is_done()
    assert not steps[1].waits_for_masks
    assert set(outputs([steps[1].result()])) == {0, 1, 2, 3, 5}


def test_the_host_marks_errors_only_where_masks_are_late(gpu: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other steps are sampled as a graph would sample them."""
    marked, enqueue = list[bool](), SamplingRounds.enqueue

    def noted(rounds: SamplingRounds, sizes: Any, metadata: Any, logprobs: Any, on_host: Any) -> Any:
        marked.append(on_host is not None)
        return enqueue(rounds, sizes, metadata, logprobs, on_host)

    monkeypatch.setattr(SamplingRounds, "enqueue", noted)
    both = tuple(sequence(slot, [5, 9], Stepper.blocks(slot), grammar=LETTERS) for slot in range(2))
    first = {"admitted": both, "scheduled": scheduled((0, 2, True), (1, 2, True))}
    tokens = outputs(results(gpu, [first, *[{"decode_ready": True}] * 3], late={(2, 1)}))
    assert marked == [False, True, False, False]
    assert [len(tokens[slot]) for slot in range(2)] == [4, 3]


def test_late_rows_sample_in_the_next_step(cpu: Model, gpu: Model) -> None:
    """The first ones too; others have the bits that they have without."""
    late = {(1, 0), (1, 3), (3, 0), (3, 1), (4, 1), (6, 3)}
    punctual = outputs(results(gpu, plans(12)))
    found = results(gpu, plans(12), late)
    assert_same(found, results(cpu, plans(12), late))
    tokens = outputs(found)
    assert tokens[2] == punctual[2]
    for slot, num_late in ((0, 2), (1, 2), (3, 2)):
        assert tokens[slot] == punctual[slot][: len(tokens[slot])]
        assert len(tokens[slot]) >= len(punctual[slot]) - num_late


def test_beams_are_late_too(cpu: Model, gpu: Model) -> None:
    """A late beam has no candidates, and computes its token again; the host chooses candidates under the mask."""
    beam = sequence(
        0, [5, 9], Stepper.blocks(0), grammar=LETTERS, held=True, sampling=SequenceSampling(num_candidates=3)
    )
    letter = 5 + ord("a") - ord("!")
    again = scheduled((0, 1, True))
    steps: Plans = [
        {"admitted": (beam,), "scheduled": scheduled((0, 2, True))},
        {"scheduled": again},
        {"given": columns((0, letter)), "scheduled": again},
        {"scheduled": again},
        {"given": columns((0, letter)), "scheduled": again},
    ]
    late = {(1, 0), (3, 0)}
    expected, found = results(cpu, steps, late), results(gpu, steps, late)
    assert_same(found, expected)
    assert [len(result.candidates) for result in found] == [0, 1, 0, 1, 1]
    for result in found:
        for candidates in result.candidates.values():
            assert set(candidates.token_ids.tolist()) <= {letter, letter + 1, 1}


def test_forks_have_masks_of_their_own(cpu: Model, gpu: Model) -> None:
    source = sequence(0, [5, 9], Stepper.blocks(0), grammar=LETTERS, sampling=SequenceSampling(temperature=1.0, seed=1))
    fork = sequence(
        1,
        [5, 9],
        Stepper.blocks(0)[:1],
        computed=1,
        grammar=LETTERS,
        sampling=SequenceSampling(temperature=1.0, seed=2),
    )
    steps: Plans = [
        {"admitted": (source, fork), "scheduled": scheduled((0, 2, True)), "forks": columns((1, 0))},
        {"released_slots": ints(1), "decode_ready": True},
        {"decode_ready": True},
    ]
    for late in ((), {(1, 0)}):
        assert_same(results(gpu, steps, late), results(cpu, steps, late))
