"""Models with recurrent states on the GPU's kernels: transformers' greedy tokens, through all that moves a state."""

from __future__ import annotations

from collections import deque
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import BlockMoves, StateSaves
from cadenza_common.plan.result import StepResult
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.speculation.ngram import NgramSource
from tests.checkpoints import RECURRENT, make_checkpoint
from tests.executor_svc.driver import Model
from tests.helpers.executor.plans import columns, ints, scheduled, sequence
from tests.helpers.executor.stepping import Stepper
from tests.helpers.marks import short_and_long
from tests.helpers.models.golden import transformers_greedy, transformers_model

pytestmark = pytest.mark.slow

PROMPT = list(range(3, 63))
FEWEST_LAYERS: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "qwen3_5_delta": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}


def make(folder: Path, family: str) -> Path:
    return make_checkpoint(folder, family, **FEWEST_LAYERS.get(family, {}))


@pytest.mark.parametrize("family", short_and_long(list(RECURRENT), ["lfm2", "qwen3_5_delta", "nemotron_h"]))
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """A prompt in chunks, another beside the last of them, decodes, a swap to other pages, and a fork with a copy."""
    folder = make(tmp_path, family)
    reference = transformers_model(folder)
    wanted, beside = (transformers_greedy(reference, prompt, 7).tokens for prompt in (PROMPT, PROMPT[20:50]))
    stepper = Stepper(Model(folder, device="cuda", num_cpu_blocks=128), more_states=1)
    first = sequence(0, PROMPT, stepper.blocks(0)[:8], state_pages=stepper.state(0))
    second = sequence(1, PROMPT[20:50], stepper.blocks(1)[:4], state_pages=stepper.state(1))
    steps = [
        stepper.step(admitted=(first,), scheduled=scheduled((0, 25, False))),
        stepper.step(scheduled=scheduled((0, 20, False))),
        stepper.step(admitted=(second,), scheduled=scheduled((0, 15, True), (1, 30, True))),
        stepper.step(decode_ready=True, appends=columns((1, 20), (0, 21), (1, 22))),
    ]
    assert [step.token_ids.tolist() for step in steps] == [[], [], *map(list, zip(wanted[:2], beside[:2], strict=True))]
    known, blocks, moved = [*PROMPT, *wanted[:2]], [*stepper.blocks(0)[:8], 21], stepper.blocks(2)[:9]
    kept, away = stepper.pages(blocks) + stepper.state(0), stepper.pages(moved) + stepper.state(8)
    steps = [stepper.step(released_slots=[0], swap_out=BlockMoves(kept, list(range(len(kept)))))]
    back = sequence(0, known, moved, computed=len(known) - 1, prompt=len(PROMPT), state_pages=stepper.state(8))
    in_place = BlockMoves(list(range(len(kept))), away)
    steps.append(stepper.step(swap_in=in_place, admitted=(back,), decode_ready=True))
    known.append(wanted[2])
    shared = [*moved[:7], 100, *stepper.blocks(3)[:1]]
    fork = sequence(3, known, shared, len(known) - 1, prompt=len(PROMPT), state_pages=stepper.state(3))
    copies = BlockMoves(stepper.pages([moved[7]]) + stepper.state(8), stepper.pages([100]) + stepper.state(3))
    steps.append(stepper.step(copies=copies, admitted=(fork,), decode_ready=True))
    steps.append(stepper.step(decode_ready=True))
    found = [sorted(step.token_ids.tolist()) for step in steps]
    assert found == [
        [], sorted((wanted[2], beside[2])), sorted((wanted[3], beside[3], wanted[3])),
        sorted((wanted[4], beside[4], wanted[4])),
    ]  # fmt: skip


def test_saves_inside_chunks_and_decodes_are_named_and_go_on(tmp_path: Path) -> None:
    folder = make(tmp_path, "qwen3_5_delta")
    wanted = transformers_greedy(transformers_model(folder), PROMPT, 8).tokens
    stepper = Stepper(Model(folder, device="cuda"), more_states=3)
    first = sequence(0, PROMPT, stepper.blocks(0)[:9], state_pages=stepper.state(0))
    positions = {16: stepper.state(8), 40: stepper.state(9), 64: stepper.state(10)}
    saves = StateSaves([0, 0, 0], list(positions), [*chain.from_iterable(positions.values())])
    results = [
        stepper.step(admitted=(first,), state_saves=saves, scheduled=scheduled((0, 41, False))),
        stepper.step(scheduled=scheduled((0, 19, True))),
        *(stepper.step(decode_ready=True) for _ in range(6)),
    ]
    assert [token for each in results for token in each.token_ids.tolist()] == wanted[:7]
    assert saved(results) == {0: [(0, 16), (0, 40)], 6: [(0, 64)]}  # the first decode has 60 tokens before it
    known = [*PROMPT, *wanted]
    for slot, (position, pages) in enumerate(positions.items(), 1):
        blocks = stepper.blocks(0)[: position // 8] + stepper.blocks(slot)[: 9 - position // 8]
        copies = BlockMoves(pages, stepper.state(slot))
        again = sequence(slot, known[:65], blocks, position, state_pages=stepper.state(slot))
        count = 65 - position
        result = stepper.step(copies=copies, admitted=(again,), scheduled=scheduled((slot, count, True)))
        assert result.token_ids.tolist() == [wanted[5]]


def test_a_plan_with_a_state_of_another_position_is_invalid(tmp_path: Path) -> None:
    """What the pages hold is known on the device only: the result says so, nothing waits for it."""
    folder = make(tmp_path, "lfm2")
    stepper = Stepper(Model(folder, device="cuda"))
    first = sequence(0, PROMPT[:20], stepper.blocks(0)[:4], state_pages=stepper.state(0))
    good = stepper.step(admitted=(first,), scheduled=scheduled((0, 20, True)))
    wrong = sequence(1, PROMPT[:20], stepper.blocks(0)[:4], 16, state_pages=stepper.state(0))
    assert not len(good.error_slots)
    with pytest.raises(InvalidPlan, match="state_pages of slot 1 hold a state that stands elsewhere"):
        stepper.step(admitted=(wrong,), scheduled=scheduled((0, 1, True), (1, 4, True)))


@pytest.fixture(scope="module")
def undrafted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[StepResult]]:
    """A model, and what it decodes without drafts."""
    folder = make(tmp_path_factory.mktemp("model"), "qwen3_5_delta")
    return folder, decoded(Stepper(Model(folder, device="cuda"), more_states=4, max_inflight_plans=2), 0)


@pytest.mark.parametrize("max_drafts", [1, 3])
def test_drafts_change_no_token_and_no_save(max_drafts: int, undrafted: tuple[Path, list[StepResult]]) -> None:
    """Two steps in flight: how many drafts were accepted is known two steps later."""
    folder, plain = undrafted
    options: dict[str, Any] = {"speculative": "ngram", "num_speculative_tokens": max_drafts}
    stepper = Stepper(
        Model(folder, device="cuda", **options), max_drafts=max_drafts,
        drafts=lambda limits: NgramSource(limits, min_match=1), more_states=4, max_inflight_plans=2,
    )  # fmt: skip
    drafted = decoded(stepper, max_drafts)
    assert [tokens_of(each)[:40] for each in (plain, drafted)] == [tokens_of(plain)[:40]] * 2
    accepted = sum(sum(each.num_accepted) for each in drafted)
    assert accepted > 3
    assert sum(sum(each.num_drafts) for each in drafted) - accepted > 3
    named = [each for step in saved(drafted).values() for each in step]
    assert named == [(0, position) for position in POSITIONS]
    headers, copies = stepper.pools.pool.view(torch.int32), [stepper.state(index) for index in SAVED_AT]
    assert [int(headers[pages[0], 0]) for pages in copies] == POSITIONS
    # Each goes on as the sequence went, beside it: the same tokens, drafted or not.
    known = [*PROMPT[:30], *tokens_of(plain)]
    for slot, (position, pages) in enumerate(zip(POSITIONS, copies, strict=True), 1):
        blocks = stepper.blocks(0)[: position // 8] + stepper.blocks(slot)[: 12 - position // 8]
        again = sequence(
            slot, known[:61], blocks, position, prompt=30, sampling=FEW_TOKENS, state_pages=stepper.state(slot)
        )
        result = stepper.step(
            copies=BlockMoves(pages, stepper.state(slot)), admitted=(again,),
            scheduled=scheduled((slot, 61 - position, True)),
        )  # fmt: skip
        assert result.token_ids.tolist() == known[61:62]


POSITIONS, SAVED_AT = [24, 32, 48, 56], range(8, 12)
FEW_TOKENS = SequenceSampling(allowed_token_ids=ints(3, 4, 7))
"""So that some drafts are right, and some wrong."""


def decoded(stepper: Stepper, max_drafts: int) -> list[StepResult]:
    """Decode 45 tokens behind a prompt, and save its state at POSITIONS."""
    first = sequence(
        0, PROMPT[:30], stepper.blocks(0)[:12], max_drafts=max_drafts, max_len=90 if max_drafts else 0,
        sampling=FEW_TOKENS, state_pages=stepper.state(0),
    )  # fmt: skip
    saves = StateSaves([0] * 4, POSITIONS, [*chain.from_iterable(map(stepper.state, SAVED_AT))])
    pending = deque([stepper.launch(admitted=(first,), state_saves=saves, scheduled=scheduled((0, 30, True)))])
    results: list[StepResult] = []
    while len(tokens_of(results)) < 45:
        pending.append(stepper.launch(step_id=2 + len(results), decode_ready=True, max_drafts=max_drafts))
        results.append(pending.popleft().result())
    return [*results, pending.popleft().result(), stepper.step(held_slots=[0])]


def tokens_of(results: list[StepResult]) -> list[int]:
    return [token for each in results for token in each.token_ids]


def saved(results: list[StepResult]) -> dict[int, list[tuple[int, int]]]:
    """Return the saves by step, of steps that made some."""
    found = [list(zip(each.saved_slots, each.saved_positions, strict=True)) for each in results]
    return {step: each for step, each in enumerate(found) if each}
