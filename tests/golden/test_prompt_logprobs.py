"""Logprobs of prompt tokens: transformers' values, the same bits however the prompt is cut into chunks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cadenza_common.plan.result import LogprobColumns, SlotError
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.sampling import logprobs
from tests.checkpoints import make_llama
from tests.executor_svc.driver import Model
from tests.helpers.executor.plans import ints, scheduled, sequence
from tests.helpers.executor.stepping import Stepper

VOCAB = 131
LENGTH = 50
CHUNKINGS: dict[str, list[int]] = {
    "one chunk": [LENGTH],
    "chunks of 1": [1] * LENGTH,
    "chunks of 3": [3] * 16 + [2],
    "chunks of 16": [16, 16, 16, 2],
    "ragged": [7, 1, 20, 2, 15, 5],
    "last token alone": [49, 1],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"), vocab_size=VOCAB)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    return Model(checkpoint)


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Tensor:
    """[LENGTH, VOCAB] log_softmax of transformers for `prompt(0)`."""
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        return reference(torch.tensor([prompt(0)])).logits[0].double().log_softmax(dim=1)


def asking(num_top: int | None, **fields: Any) -> SequenceSampling:
    return SequenceSampling(num_prompt_logprobs=num_top, **fields)


def compute(model: Model, chunks: list[int], num_top: int = 4, company: bool = False) -> list[LogprobColumns]:
    """What each chunk of `prompt(0)` reports; company: beside decodes, and another prompt that requests more."""
    stepper = Stepper(model)
    admitted = [sequence(1, prompt(0), stepper.blocks(1), sampling=asking(num_top))]
    others: list[tuple[int, int, bool]] = []
    if company:
        admitted.append(sequence(0, prompt(1, 5), stepper.blocks(0), sampling=asking(None, num_logprobs=2)))
        admitted.append(sequence(4, prompt(2, 90), stepper.blocks(4), sampling=asking(9)))
        others = [(0, 5, True)]
    reported = []
    for index, count in enumerate(chunks):
        is_last = index == len(chunks) - 1
        rows = [(1, count, is_last), *others]
        if company and index < 3:
            rows.append((4, 30, index == 2))
        result = stepper.step(admitted=tuple(admitted), scheduled=scheduled(*rows))
        admitted, others = [], [(0, 1, True)] if company else []
        reported += [item for slot, item in result.prompt_logprobs.items() if slot == 1]
    return reported


def joined(reported: list[LogprobColumns]) -> tuple[bytes, ...]:
    """Every column over all chunks, to the bit."""
    columns = ("logprobs", "ranks", "top_token_ids", "top_logprobs")
    return tuple(np.concatenate([getattr(item, name) for item in reported]).tobytes() for name in columns)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CHUNKINGS)
@pytest.mark.parametrize("company", [False, True], ids=["alone", "in company"])
def test_every_chunking_gives_transformers_logprobs(model: Model, expected: Tensor, name: str, company: bool) -> None:
    reported = compute(model, CHUNKINGS[name], company=company)
    position, tokens = 1, prompt(0)
    for item in reported:
        assert item.start == position
        assert item.num_top == 4
        for i, logprob in enumerate(item.logprobs):
            row, token = expected[position - 1], tokens[position]
            assert logprob == pytest.approx(float(row[token]), abs=2e-4)
            assert item.ranks[i] == int((row > row[token]).sum()) + 1
            best = row.topk(4)
            assert item.top_token_ids[4 * i : 4 * i + 4].tolist() == best.indices.tolist()
            np.testing.assert_allclose(item.top_logprobs[4 * i : 4 * i + 4], best.values, atol=2e-4)
            position += 1
    # The last token of the prompt predicts output, and the first is predicted by nothing.
    assert position == LENGTH
    assert joined(reported) == joined(compute(model, [LENGTH]))


def test_bfloat16_chunks_change_no_bit(checkpoint: Path) -> None:
    rounded = Model(checkpoint, dtype="bfloat16")
    whole = joined(compute(rounded, [LENGTH]))
    for chunks in CHUNKINGS.values():
        assert joined(compute(rounded, chunks, company=True)) == whole


@pytest.mark.parametrize("rows_at_once", [1, 2, 7, 48])
def test_pieces_change_no_bit(model: Model, monkeypatch: pytest.MonkeyPatch, rows_at_once: int) -> None:
    whole = joined(compute(model, [30, 20], company=True))
    widths: list[int] = []
    row_logprobs = logprobs.row_logprobs

    def watched(logits: Tensor, *rest: Any) -> Any:
        widths.append(len(logits))
        return row_logprobs(logits, *rest)

    monkeypatch.setattr(logprobs, "_PIECE_BYTES", rows_at_once * 4 * VOCAB)
    monkeypatch.setattr(logprobs, "row_logprobs", watched)
    assert joined(compute(model, [30, 20], company=True)) == whole
    assert max(widths) == rows_at_once


@pytest.mark.parametrize("num_top", [0, 1, VOCAB])
def test_any_number_of_best_tokens(model: Model, expected: Tensor, num_top: int) -> None:
    (item,) = compute(model, [LENGTH], num_top)
    best = expected[: LENGTH - 1].topk(num_top, dim=1)
    assert item.num_top == num_top
    assert len(item.logprobs) == LENGTH - 1
    assert len(item.top_token_ids) == len(item.top_logprobs) == num_top * (LENGTH - 1)
    np.testing.assert_allclose(item.top_logprobs, best.values.flatten(), atol=2e-4)


def test_output_tokens_are_not_scored_after_a_preemption(model: Model) -> None:
    """A sequence that comes back computes prompt and output again; it reports the prompt's logprobs only."""
    whole = joined(compute(model, [LENGTH]))
    stepper = Stepper(model)
    tokens = [*prompt(0), 9, 8, 7, 6]
    back = sequence(2, tokens, stepper.blocks(2), prompt=LENGTH, sampling=asking(4))
    reported = list(stepper.step(admitted=(back,), scheduled=scheduled((2, 40, False))).prompt_logprobs.values())
    reported += stepper.step(scheduled=scheduled((2, 14, True))).prompt_logprobs.values()
    assert [item.start for item in reported] == [1, 41]
    assert joined(list(reported)) == whole
    assert not stepper.step(decode_ready=True).prompt_logprobs


def test_a_prompt_that_is_computed_in_part_is_scored_in_part(model: Model) -> None:
    stepper = Stepper(model)
    stepper.step(admitted=(sequence(0, prompt(0), stepper.blocks(0)),), scheduled=scheduled((0, 20, False)))
    back = sequence(0, prompt(0), stepper.blocks(0), 20, sampling=asking(4))
    result = stepper.step(released_slots=ints(0), admitted=(back,), scheduled=scheduled((0, 30, True)))
    (item,) = result.prompt_logprobs.values()
    assert item.start == 21
    (_, whole) = compute(model, [20, 30])
    assert joined([item]) == joined([whole])


def test_a_prompt_of_one_token_has_none(model: Model) -> None:
    stepper = Stepper(model)
    alone = sequence(0, [5], stepper.blocks(0), sampling=asking(3))
    result = stepper.step(admitted=(alone,), scheduled=scheduled((0, 1, True)))
    assert not result.prompt_logprobs
    assert len(result.token_ids) == 1


def test_a_prompt_whose_logits_are_not_finite_fails_when_it_samples(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result has errors of slots that sample alone, so the failure of a chunk waits; others do not notice."""
    stepper = Stepper(model)
    runner = stepper.executor._runner
    logits = runner.logits

    def broken(hidden: Tensor, rows: Tensor) -> Tensor:
        out = logits(hidden, rows)
        if len(rows) == 9:
            out[3, 4] = float("nan")
        return out

    monkeypatch.setattr(runner, "logits", broken)
    admitted = (
        sequence(0, prompt(0, 12), stepper.blocks(0), sampling=asking(1)),
        sequence(1, prompt(1, 12), stepper.blocks(1), sampling=asking(None, num_logprobs=0)),
    )
    first = stepper.step(admitted=admitted, scheduled=scheduled((0, 9, False), (1, 12, True)))
    assert (first.slots.tolist(), first.error_slots.tolist()) == ([1], [])
    second = stepper.step(scheduled=scheduled((0, 3, True), (1, 1, True)))
    assert second.error_slots.tolist() == [0]
    assert second.errors == (SlotError.NON_FINITE_LOGITS,)
    assert second.num_tokens.tolist() == [0, 1]
    again = sequence(0, prompt(0, 12), stepper.blocks(0), sampling=asking(1))
    third = stepper.step(released_slots=ints(0), admitted=(again,), scheduled=scheduled((0, 12, True)))
    assert third.slots.tolist() == [0]
    assert not len(third.error_slots)
