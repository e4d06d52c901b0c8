"""A draft model on the GPU's path: no token changes, and with the target's own weights and noise no draft is refused.

The draft's layers of the cache are full of NaN: a token that reads what was not computed there gives no draft.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza_common.plan.plan import BlockMoves
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.config import ExecutorConfig
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.models.decoder import Decoder
from executor_svc.models.heads.draft import LoadedDraft, load_draft
from tests.executor_svc.driver import Model, spoil
from tests.executor_svc.gpu.drafted_steps import (
    MAX_DRAFTS,
    PERIODIC,
    REQUESTS,
    WITH_DRAFTS,
    Outputs,
    copies_of_decodes,
    make_model,
    note_device_calls,
    outputs,
)
from tests.helpers.executor.plans import ints, scheduled, sequence
from tests.helpers.executor.stepping import Stepper

DRAWN = SequenceSampling(temperature=0.7, seed=3, top_k=9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def cpu(folder: Path) -> Model:
    return Model(folder)


@pytest.fixture(scope="module")
def gpu(folder: Path) -> Model:
    return Model(folder, device="cuda", num_cpu_blocks=8)


def draft_of(model: Model, folder: Path) -> LoadedDraft[Decoder]:
    return load_draft(str(folder), ExecutorConfig(**model.options), model.device, model.loaded)


def drafting(model: Model, folder: Path, **limits: Any) -> Stepper:
    """Steps with the model in this folder as draft."""
    stepper = Stepper(model, draft=draft_of(model, folder), **WITH_DRAFTS | limits)
    spoil(stepper.pools)
    return stepper


@pytest.mark.long
def test_every_draft_is_accepted(cpu: Model, gpu: Model, folder: Path) -> None:
    """But those behind a stop: of penalties, bad words, stop ids, chunks of prompts beside decodes."""
    expected = outputs(Stepper(cpu, max_drafts=MAX_DRAFTS), 0)
    found = outputs(drafting(gpu, folder), MAX_DRAFTS)
    assert found.tokens == expected.tokens
    assert found.ended == expected.ended == set(range(len(REQUESTS)))
    assert found.top == expected.top
    assert len(found.refused) == len(set(found.refused))
    # Each sequence at its end at most: at a stop id, since drafts end before the greatest length.
    assert set(found.refused) <= {slot for slot, (_, sampling) in enumerate(REQUESTS) if "stop_token_ids" in sampling}
    assert found.num_accepted > 40


def test_another_model_changes_no_token(cpu: Model, gpu: Model, tmp_path: Path) -> None:
    other = make_model(tmp_path, intermediate_size=48)
    model = Model(Path(gpu.options["model"]), device="cuda", enforce_eager=True)
    begin = {
        "admitted": (
            sequence(0, PERIODIC, Stepper.blocks(0), max_drafts=3),
            sequence(1, [8, 9] * 3, Stepper.blocks(1), sampling=DRAWN, max_drafts=2),
        ),
        "scheduled": scheduled((0, 12, True), (1, 6, True)),
    }
    stepper, found = drafting(model, other), Outputs()
    for fields in (begin, *[{"decode_ready": True, "max_drafts": 3}] * 4):
        found.add(stepper.step(**fields))
    stepper, expected = Stepper(cpu, max_drafts=3), Outputs()
    for fields in (begin, *[{"decode_ready": True}] * 16):
        expected.add(stepper.step(**fields))
    assert {slot: expected.tokens[slot][: len(tokens)] for slot, tokens in found.tokens.items()} == found.tokens
    assert found.num_accepted < found.num_drafts == 4 * 5


def test_steps_without_drafts_leave_no_gap(gpu: Model, folder: Path) -> None:
    """Single tokens of a prompt, and steps without drafts after some whose last draft was accepted."""
    stepper, found = drafting(gpu, folder), Outputs()
    prompt = sequence(0, PERIODIC, Stepper.blocks(0), max_drafts=3)
    found.add(stepper.step(admitted=(prompt,), scheduled=scheduled((0, 10, False))))
    for last in (False, True):
        found.add(stepper.step(scheduled=scheduled((0, 1, last))))
    most = (3, 0, 2, 3, 0, 0, 3)
    for count in most:
        found.add(stepper.step(decode_ready=True, max_drafts=count))
    assert found.num_accepted == found.num_drafts == sum(most)


def test_blocks_take_what_the_draft_needs_along(cpu: Model, gpu: Model, folder: Path) -> None:
    """Through prefix hits, copies, and swaps to the host and back into other blocks."""
    stepper, found = drafting(gpu, folder), Outputs()
    prompts = [[*PERIODIC, 5, 6, 7, 8, 9, 10, 11], [*PERIODIC, 5, 6, 7, 8, 1, 2]]
    decode = {"decode_ready": True, "max_drafts": 3}

    def step(*results_of: int, **fields: Any) -> None:
        before = found.num_drafts
        found.add(stepper.step(**fields | decode))
        assert found.num_accepted == found.num_drafts == before + 3 * len(results_of)

    first = sequence(0, prompts[0], [0, 1, 2, 3], max_drafts=3)
    found.add(stepper.step(admitted=(first,), scheduled=scheduled((0, 19, True))))
    step(0)
    hit = sequence(1, prompts[1], [0, 1, 20, 21, 22], computed=16, sampling=DRAWN, max_drafts=3)
    step(0, admitted=(hit,), scheduled=scheduled((1, 2, True)))
    step(0, 1)
    texts = [prompts[slot] + found.tokens[slot] for slot in (0, 1)]
    away = BlockMoves(ints(0, 1, 2, 3), ints(4, 5, 6, 7))
    found.add(stepper.step(released_slots=ints(0, 1), swap_out=away))
    host = [layer.clone() for layer in stepper.pools.draft_layers]
    spoil(stepper.pools)
    assert not all(bool(layer.isnan().all()) for layer in host)
    back = BlockMoves(ints(4, 5, 6, 7), ints(40, 41, 42, 43))
    known = {"computed": len(texts[0]) - 1, "prompt": 19, "max_drafts": 3}
    again = sequence(2, texts[0], [40, 41, 42, 43, 44, 45], **known)
    step(2, admitted=(again,), swap_in=back)
    # The same again, beside the first: it has a copy of the last block that both have begun.
    place = known["computed"] // 8
    copied = sequence(3, texts[0], [*range(40, 40 + place), *range(60, 64)], **known)
    step(2, 3, admitted=(copied,), copies=BlockMoves(ints(40 + place), ints(60)))
    step(2, 3)
    stepper, expected = Stepper(cpu, max_drafts=3), Outputs()
    both = tuple(
        sequence(slot, prompts[slot], Stepper.blocks(slot), sampling=sampling)
        for slot, sampling in enumerate((SequenceSampling(), DRAWN))
    )
    expected.add(stepper.step(admitted=both, scheduled=scheduled((0, 19, True), (1, 18, True))))
    for _ in range(30):
        expected.add(stepper.step(decode_ready=True))
    for slot, whole in enumerate(expected.tokens[0] for _ in (2, 3)):
        tokens = found.tokens[0] + found.tokens[slot + 2]
        assert tokens == whole[: len(tokens)]
    assert found.tokens[1] == expected.tokens[1][: len(found.tokens[1])]


@pytest.mark.parametrize(
    "sampling", [pytest.param(SequenceSampling(), marks=pytest.mark.long), DRAWN], ids=["greedy", "drawn"]
)
def test_the_same_decodes_send_nothing_and_are_three_graphs(
    sampling: SequenceSampling, gpu: Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, replayed = note_device_calls(monkeypatch)
    stepper, found = drafting(gpu, folder), Outputs()
    first = sequence(0, PERIODIC, Stepper.blocks(0), max_drafts=3, sampling=sampling)
    found.add(stepper.step(admitted=(first,), scheduled=scheduled((0, 12, True))))
    replayed.clear()
    assert copies_of_decodes(stepper, sent, found) == [1, 0, 0]
    # Of the drafts, of the tokens' logits, of the choices.
    assert replayed == [StepSizes.decode(1, 3)] * 9
    assert found.num_accepted == found.num_drafts == 9


def test_no_drafts_where_their_first_pass_exceeds_the_tokens_of_a_step(gpu: Model, folder: Path) -> None:
    stepper, found = drafting(gpu, folder, max_num_batched_tokens=5), Outputs()
    for slot in range(3):
        each = sequence(slot, [3, slot, 5], Stepper.blocks(slot), max_drafts=3)
        found.add(stepper.step(admitted=(each,), scheduled=scheduled((slot, 3, True))))
    found.add(stepper.step(decode_ready=True, max_drafts=3))
    assert (found.num_drafts, [len(found.tokens[slot]) for slot in range(3)]) == (0, [2, 2, 2])
    found.add(stepper.step(released_slots=ints(0), decode_ready=True, max_drafts=3))
    assert found.num_accepted == found.num_drafts == 2
    assert np.diff([len(found.tokens[slot]) for slot in range(3)]).tolist() == [2, 0]
