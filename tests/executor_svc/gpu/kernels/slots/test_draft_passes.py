"""The tensors of a draft model's passes, and the drafts that they leave in the slots."""

from __future__ import annotations

import pytest
import torch

from executor_svc.gpu.kernels.slots.draft_passes import first_pass, next_pass
from executor_svc.gpu.kernels.slots.slots import SlotState, StepBuffers, StepInputs, StepSizes

POISON = -(2**31)
MANY = 2**31 - 1
SIZE = 8
"""Tokens of a block."""


def ints(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.fixture
def state(device: torch.device) -> SlotState:
    """Six slots of 17 tokens, token p of slot s is 100 s + p, in the blocks 10 s, 10 s + 1, ...: one to compute."""
    state = SlotState.empty(6, 640, 60, 5, device)
    state.words.fill_(POISON)
    slots, places = torch.arange(6, device=device)[:, None], torch.arange(60, device=device)
    state.token_ids[:, :17] = (100 * slots + places[:17]).int()
    state.block_tables[:] = (10 * slots + places[:5]).int()
    state.num_tokens[:], state.num_computed_tokens[:] = 17, 16
    state.num_prompt_tokens[:] = 9
    state.stopped[:] = 0
    state.max_drafts[:], state.drafts_end[:] = 4, MANY
    return state


def staged(seqs: list[tuple[int, int]], sizes: StepSizes, most: int, device: torch.device) -> torch.Tensor:
    """The words of sequences (slot, tokens), as far as passes read them; the last is the most drafts of a slot."""
    starts = [sum(count for _, count in seqs[:end]) for end in range(len(seqs) + 1)]
    words = [*(slot for slot, _ in seqs), *starts]
    return ints([*words, *[POISON] * (sizes.num_words - len(words) - 1), most, POISON], device)


def tensors_of(buffers: StepBuffers, num_tokens: int, num_seqs: int) -> StepInputs:
    return buffers.inputs(StepSizes(num_tokens, num_seqs, num_seqs, num_seqs))


def test_passes_of_slots_with_other_numbers_of_drafts(device: torch.device, state: SlotState) -> None:
    """One with all, one with a single place, one whose row fails; none: a prompt, a slot that has stopped, padding."""
    state.num_computed_tokens[3], state.stopped[4] = 11, 1
    seqs = [(0, 4), (1, 2), (2, 4), (3, 4), (4, 4), (-1, 1)]
    sizes = StepSizes(19, 6, 6, 6, 3)
    buffers = StepBuffers.empty(sizes, 5, device)
    before = state.token_ids.clone()
    first_pass(staged(seqs, sizes, 3, device), state, buffers, sizes, 6, SIZE)
    assert state.num_drafts.tolist() == [3, 1, 3, 0, 0, POISON]
    assert state.num_guessed.tolist() == [17] * 4 + [0, POISON]
    found = tensors_of(buffers, 12, 6)
    assert found.token_ids.tolist() == [15, 16, 115, 116, 215, 216] + [0] * 6
    assert found.positions.tolist() == [15, 16] * 3 + [0] * 6
    assert found.slot_mapping.tolist() == [15, 16, 95, 96, 175, 176] + [-1] * 6
    assert found.rope_lens.tolist() == [16, 17] * 3 + [1] * 6
    assert found.query_start_loc.tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert found.seq_lens.tolist() == [17] * 3 + [0] * 3
    assert found.block_tables[:3, :3].tolist() == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    assert found.logits_rows.tolist() == [1, 3, 5, 7, 9, 11]
    assert (found.rows.tolist(), found.sources.tolist()) == ([0, 1, 2, -1, -1, -1], list(range(6)))

    tokens = torch.tensor([7, 8, -1, 99, 99, 99], device=device)
    next_pass(tokens, ints([0, 0, 1, 0, 0, 0], device), state, buffers, 6, 1, SIZE)
    found = tensors_of(buffers, 6, 6)
    assert found.token_ids.tolist() == [7] + [0] * 5
    assert found.positions.tolist() == [17] + [0] * 5
    assert found.slot_mapping.tolist() == [17] + [-1] * 5
    assert found.rope_lens.tolist() == [18] + [1] * 5
    assert found.query_start_loc.tolist() == list(range(7))
    assert found.seq_lens.tolist() == [18] + [0] * 5
    assert found.logits_rows.tolist() == list(range(6))
    assert (found.rows.tolist(), found.sources.tolist()) == ([0] + [-1] * 5, list(range(6)))
    assert (state.num_guessed[0], state.num_drafts.tolist()) == (18, [3, 1, 0, 0, 0, POISON])
    for index, token in ((2, 40), (3, 41)):
        next_pass(torch.full_like(tokens, token), ints([0] * 6, device), state, buffers, 6, index, SIZE)
    assert tensors_of(buffers, 6, 6).seq_lens.tolist() == [0] * 6
    before[0, 17:20], before[1, 17] = ints([7, 40, 41], device), 8
    assert torch.equal(state.token_ids, before)
    assert state.num_drafts.tolist() == [3, 1, 0, 0, 0, POISON]


def test_who_has_how_many(device: torch.device, state: SlotState) -> None:
    """By the step's most, the slot's most and end, and its places; none in a step without."""
    state.max_drafts[1], state.drafts_end[2], state.drafts_end[3] = 2, 18, 17
    state.num_tokens[5], state.num_computed_tokens[5] = 1, 0
    seqs = [(0, 6), (1, 6), (2, 6), (3, 6), (4, 2), (5, 6)]
    sizes = StepSizes(32, 6, 6, 6, 5)
    buffers = StepBuffers.empty(sizes, 5, device)
    first_pass(staged(seqs, sizes, 3, device), state, buffers, sizes, 6, SIZE)
    assert state.num_drafts.tolist() == [3, 2, 1, 0, 1, 0]
    found = tensors_of(buffers, 12, 6)
    assert found.seq_lens.tolist() == [17] * 5 + [0]
    assert found.rows.tolist() == [0, 1, 2, -1, 4, -1]
    sizes = StepSizes(32, 6, 6, 6)
    first_pass(staged(seqs, sizes, 3, device), state, buffers, sizes, 5, SIZE)
    assert state.num_drafts.tolist() == [0] * 6
    assert tensors_of(buffers, 10, 5).seq_lens.tolist() == [17] * 5


def test_passes_of_a_head_compute_the_row_before_each_draft(device: torch.device, state: SlotState) -> None:
    """The first computes nothing: it reads the results of slots that may have drafts."""
    state.num_computed_tokens[3], state.stopped[4], state.drafts_end[1] = 11, 1, 18
    seqs = [(2, 4), (1, 4), (5, 1), (3, 4), (4, 4), (-1, 1)]
    sizes = StepSizes(18, 6, 6, 6, 3)
    buffers = StepBuffers.empty(sizes, 5, device)
    before = state.token_ids.clone()
    first_pass(staged(seqs, sizes, 3, device), state, buffers, sizes, 6, SIZE, head=True)
    assert state.num_drafts.tolist() == [POISON, 1, 3, 0, 0, 0]
    found = tensors_of(buffers, 6, 6)
    assert found.logits_rows.tolist() == [2, 1, -1, -1, -1, -1]
    assert (found.rows.tolist(), found.sources.tolist()) == ([2, 1, -1, -1, -1, -1], list(range(6)))
    assert found.block_tables[:2, :3].tolist() == [[20, 21, 22], [10, 11, 12]]
    for index, token in ((1, 40), (2, 41), (3, 42)):
        tokens = torch.full((6,), token, device=device)
        next_pass(tokens, ints([0] * 6, device), state, buffers, 6, index, SIZE, head=True)
        found, there = tensors_of(buffers, 6, 6), index < 3
        position = 15 + index if there else 0
        assert found.token_ids.tolist() == [token if there else 0] + [0] * 5
        assert found.positions.tolist() == [position] + [0] * 5
        assert found.slot_mapping.tolist() == [160 + position if there else -1] + [-1] * 5
        assert found.rope_lens.tolist() == [position + 1] + [1] * 5
        assert found.seq_lens.tolist() == [position + 1 if there else 0] + [0] * 5
        assert found.query_start_loc.tolist() == list(range(7))
        assert found.rows.tolist() == [2 if there else -1] + [-1] * 5
        assert int(state.num_guessed[2]) == 17 + min(index, 2)
    before[2, 17:20], before[1, 17] = ints([40, 41, 42], device), 40
    assert torch.equal(state.token_ids, before)


def test_wrong_arguments_are_named(device: torch.device, state: SlotState) -> None:
    sizes = StepSizes.decode(2, 1)
    buffers, words = StepBuffers.empty(sizes, 5, device), staged([(0, 2), (1, 2)], sizes, 1, device)
    tokens, errors = torch.zeros(2, dtype=torch.int64, device=device), ints([0, 0], device)
    single = StepBuffers.empty(StepSizes.decode(2), 5, device)
    for message, wrong in (
        ("staging must be contiguous torch.int32", lambda: first_pass(words.long(), state, buffers, sizes, 2, SIZE)),
        ("staging has 3 words", lambda: first_pass(words[:3], state, buffers, sizes, 2, SIZE)),
        ("num_seqs: 2 sequences of 2 tokens", lambda: first_pass(words, state, single, sizes, 2, SIZE)),
        ("num_seqs 2 is not 0 to 1", lambda: first_pass(words, state, buffers, StepSizes.decode(1, 1), 2, SIZE)),
        ("tokens must be contiguous torch.int64", lambda: next_pass(errors, errors, state, buffers, 2, 1, SIZE)),
        ("errors must be contiguous torch.int32", lambda: next_pass(tokens, tokens, state, buffers, 2, 1, SIZE)),
        ("index must be at least 1", lambda: next_pass(tokens, errors, state, buffers, 2, 0, SIZE)),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
