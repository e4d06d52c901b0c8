"""n samples of one prompt by forks: the tokens and logprobs of n separate sequences, to the bit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cadenza_common.plan.plan import BlockMoves
from cadenza_common.plan.result import SlotError, StepResult
from cadenza_common.plan.sampling import SequenceSampling
from tests.checkpoints import make_llama
from tests.executor_svc.driver import Model
from tests.helpers.executor.plans import columns, ints, scheduled, sequence
from tests.helpers.executor.stepping import BLOCK_SIZE, Stepper

NUM_OUTPUT = 12
WORDS = tuple(ints(*word) for word in ([5], [17, 18], *([i, i] for i in range(20, 130))))
DRAWN = SequenceSampling(temperature=1.2, seed=77)
SAMPLINGS = [
    DRAWN,
    replace(DRAWN, sample_index=1),
    replace(DRAWN, sample_index=2, top_k=9, num_logprobs=3),
    replace(DRAWN, sample_index=3, repetition_penalty=1.3, frequency_penalty=0.4, bad_words=WORDS, num_logprobs=0),
    SequenceSampling(num_logprobs=2),
]
"""Of slots 0 to 4; those from 1 on are forks of slot 0."""

Outcome = tuple[list[int], list[bytes]]
"""Tokens, and the bits of their logprobs if they were requested."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_llama(tmp_path_factory.mktemp("model")), dtype=request.param)


@pytest.fixture
def stepper(model: Model) -> Stepper:
    return new_stepper(model)


def new_stepper(model: Model) -> Stepper:
    """With a cache of NaN: whoever reads what was not computed, shared or copied fails."""
    stepper = Stepper(model)
    for layer in stepper.executor._pools.layers:
        layer.fill_(float("nan"))
    return stepper


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(2, 131) for _ in range(length)]


class Outputs:
    """What the slots of a run have sampled so far."""

    def __init__(self, num_slots: int) -> None:
        self.found: list[Outcome] = [([], []) for _ in range(num_slots)]

    def add(self, result: StepResult) -> StepResult:
        assert not result.errors
        counts = result.num_tokens if len(result.num_tokens) else np.ones(len(result.slots), np.int64)
        for slot, token in zip(np.repeat(result.slots, counts).tolist(), result.token_ids.tolist(), strict=True):
            if slot < len(self.found):
                self.found[slot][0].append(token)
        for slot, item in result.logprobs.items():
            bits = item.logprobs.tobytes() + item.top_token_ids.tobytes() + item.top_logprobs.tobytes()
            self.found[slot][1].append(bits)
        return result


def alone(model: Model, prompt: list[int], sampling: SequenceSampling, num_output: int = NUM_OUTPUT) -> Outcome:
    stepper, outputs = new_stepper(model), Outputs(1)
    admitted = (sequence(0, prompt, stepper.blocks(0), sampling=sampling),)
    outputs.add(stepper.step(admitted=admitted, scheduled=scheduled((0, len(prompt), True))))
    for _ in range(num_output - 1):
        outputs.add(stepper.step(decode_ready=True))
    return outputs.found[0]


def twins(stepper: Stepper, tokens: list[int], prompt: int, **fields: Any) -> tuple[Any, ...]:
    """The forks of slot 0, over its full blocks and a block of their own for what the last one holds in part."""
    num_full, is_partial = divmod(len(tokens), BLOCK_SIZE)
    return tuple(
        sequence(
            slot, tokens, stepper.blocks(0)[:num_full] + stepper.blocks(slot)[: bool(is_partial)],
            min(len(tokens) - 1, num_full * BLOCK_SIZE), prompt=prompt, sampling=SAMPLINGS[slot], **fields,
        )
        for slot in range(1, len(SAMPLINGS))
    )  # fmt: skip


def after_forks(stepper: Stepper, num_tokens: int) -> dict[str, Any]:
    """The next plan's part: the partial block is copied to each fork, and each has blocks to grow into."""
    num_full, is_partial = divmod(num_tokens, BLOCK_SIZE)
    slots = range(1, len(SAMPLINGS))
    used = int(bool(is_partial))
    copies = BlockMoves(
        ints(*[stepper.blocks(0)[num_full]] * len(slots) * used),
        ints(*(stepper.blocks(slot)[0] for slot in slots if used)),
    )
    grown = [(slot, block) for slot in slots for block in stepper.blocks(slot)[used : used + 3]]
    return {"copies": copies, "appends": columns(*grown)}


FORKS = columns(*((slot, 0) for slot in range(1, len(SAMPLINGS))))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 19])
def test_n_samples_of_a_prompt_are_n_sequences(model: Model, stepper: Stepper, length: int) -> None:
    """Beside another sequence that decodes, and one whose prompt comes in chunks meanwhile."""
    prompt, outputs = prompt_of(length), Outputs(len(SAMPLINGS))
    others = (
        sequence(6, [3, 4, 5], stepper.blocks(6), sampling=SequenceSampling()),
        sequence(7, prompt_of(60), stepper.blocks(7), sampling=SequenceSampling(num_prompt_logprobs=1)),
    )
    stepper.step(admitted=others, scheduled=scheduled((6, 3, True), (7, 9, False)))
    source = sequence(0, prompt, stepper.blocks(0), sampling=SAMPLINGS[0])
    result = outputs.add(
        stepper.step(
            admitted=(*twins(stepper, prompt, length), source), forks=FORKS, decode_ready=True,
            scheduled=scheduled((7, 20, False), (0, length, True)),
        )
    )  # fmt: skip
    assert result.slots.tolist() == [0, 1, 2, 3, 4, 6]
    fields = after_forks(stepper, length)
    for _ in range(NUM_OUTPUT - 1):
        outputs.add(stepper.step(decode_ready=True, **fields))
        fields = {}
    expected = [alone(model, prompt, sampling) for sampling in SAMPLINGS]
    assert outputs.found == expected
    assert len({tuple(tokens) for tokens, _ in expected}) == len(SAMPLINGS), "the samples differ"


def test_forks_of_a_sequence_that_decodes(model: Model, stepper: Stepper) -> None:
    """Held slots wait for it; the last of a chunked prompt is forked in the same way as any token."""
    prompt, outputs = prompt_of(13), Outputs(len(SAMPLINGS))
    greedy = SequenceSampling()
    admitted = (sequence(0, prompt, stepper.blocks(0), sampling=greedy),)
    stepper.step(admitted=admitted, scheduled=scheduled((0, 8, False)))
    tokens = [*prompt, *stepper.step(scheduled=scheduled((0, 5, True))).token_ids.tolist()]
    tokens += stepper.step(decode_ready=True).token_ids.tolist()
    stepper.step(admitted=twins(stepper, tokens, 13, held=True))
    result = outputs.add(stepper.step(forks=FORKS, decode_ready=True))
    assert result.slots.tolist() == [0, 1, 2, 3, 4]
    fields = after_forks(stepper, len(tokens)) | {"resumed_slots": ints(1, 2, 3, 4)}
    for _ in range(NUM_OUTPUT - 1):
        outputs.add(stepper.step(decode_ready=True, **fields))
        fields = {}
    for slot, sampling in enumerate([greedy, *SAMPLINGS[1:]]):
        one = new_stepper(model)
        back = sequence(0, tokens, one.blocks(0), prompt=13, sampling=sampling)
        expected = Outputs(1)
        expected.add(one.step(admitted=(back,), scheduled=scheduled((0, len(tokens), True))))
        for _ in range(NUM_OUTPUT - 1):
            expected.add(one.step(decode_ready=True))
        assert outputs.found[slot] == expected.found[0]


def test_without_the_copy_the_forks_fail(stepper: Stepper) -> None:
    """Or the tests above would prove nothing about it."""
    prompt = prompt_of(9)
    source = sequence(0, prompt, stepper.blocks(0), sampling=SAMPLINGS[0])
    stepper.step(admitted=(source, *twins(stepper, prompt, 9)), forks=FORKS, scheduled=scheduled((0, 9, True)))
    result = stepper.step(decode_ready=True)
    assert result.error_slots.tolist() == [1, 2, 3, 4]


def test_a_broken_row_fails_its_forks_and_nobody_else(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = stepper.executor._runner
    logits = runner.logits

    def broken(hidden: Any, rows: Any) -> Any:
        out = logits(hidden, rows).clone()
        out[0, 9] = float("nan")
        return out

    monkeypatch.setattr(runner, "logits", broken)
    prompt = prompt_of(9)
    source = sequence(0, prompt, stepper.blocks(0), sampling=SAMPLINGS[0])
    other = sequence(7, [5], stepper.blocks(7), sampling=SequenceSampling())
    result = stepper.step(
        admitted=(source, other, *twins(stepper, prompt, 9)), forks=FORKS, scheduled=scheduled((0, 9, True)),
        decode_ready=True,
    )  # fmt: skip
    assert result.error_slots.tolist() == [0, 1, 2, 3, 4]
    assert set(result.errors) == {SlotError.NON_FINITE_LOGITS}
    assert np.repeat(result.slots, result.num_tokens).tolist() == [7]


def test_forks_that_ask_for_candidates(model: Model, stepper: Stepper) -> None:
    """The source samples, its forks get candidates of the same row; and the other way round."""
    prompt = prompt_of(9)
    asking = SequenceSampling(num_candidates=6)
    reported = []
    for of_source, of_fork in ((DRAWN, asking), (asking, DRAWN)):
        result = stepper.step(
            released_slots=ints(*np.flatnonzero(stepper.executor.slots.admitted)),
            admitted=(
                sequence(3, prompt, stepper.blocks(3), sampling=of_source),
                sequence(1, prompt, stepper.blocks(3)[:1], 8, sampling=of_fork),
            ),
            scheduled=scheduled((3, 9, True)),
            forks=columns((1, 3)),
        )
        assert result.slots.tolist() == [1, 3]
        assert result.num_tokens.tolist() == ([0, 1] if of_fork is asking else [1, 0])
        assert result.token_ids.tolist() == alone(model, prompt, DRAWN, 1)[0]
        ((slot, item),) = result.candidates.items()
        assert slot == (1 if of_fork is asking else 3)
        reported.append((item.token_ids.tolist(), item.logprobs.tobytes()))
    assert reported[0] == reported[1]
    assert len(reported[0][0]) == 6
