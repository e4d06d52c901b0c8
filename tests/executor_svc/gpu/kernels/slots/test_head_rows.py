"""What a head reads behind a step, and what it keeps for the next drafts, over steps of any sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_svc.gpu.kernels.slots.head_rows import keep_results, read_next_tokens
from executor_svc.gpu.kernels.slots.slots import (
    POSITIONS,
    QUERY_START_LOC,
    SEQ_LENS,
    SEQ_SLOTS,
    TOKEN_IDS,
    SlotState,
    StepBuffers,
    StepSizes,
)

POISON = -(2**31)
NUM_SLOTS, MAX_LEN, HIDDEN = 9, 40, 24


class Step:
    """A step of random sequences, padded, behind its commit."""

    def __init__(self, seed: int, device: torch.device) -> None:
        rng = np.random.default_rng(seed)
        num_seqs = int(rng.integers(1, NUM_SLOTS))
        self.slots = rng.permutation(NUM_SLOTS)[:num_seqs].tolist()
        self.counts = rng.integers(1, 7, num_seqs).tolist()
        self.firsts = rng.integers(0, MAX_LEN - 12, num_seqs).tolist()
        self.idle = (rng.random(num_seqs) < 0.2).tolist()
        """Slots that had stopped before the step."""
        padding = int(rng.integers(3))
        self.sizes = StepSizes(sum(self.counts) + padding, num_seqs + padding, 0, 0)
        self.state = SlotState.empty(NUM_SLOTS, 64, MAX_LEN, 5, device)
        self.state.words.fill_(POISON)
        tokens = torch.arange(NUM_SLOTS)[:, None] * 1000 + torch.arange(MAX_LEN + 1)
        self.state.token_ids.copy_(tokens)
        self.buffers = StepBuffers.empty(StepSizes(64, NUM_SLOTS + 2, 4, 4), 5, device)
        self.buffers.by_token.fill_(7)
        self.known = {}
        row = 0
        for index, (slot, count, first) in enumerate(zip(self.slots, self.counts, self.firsts, strict=True)):
            # From the middle of a prompt to a step whose first token was sampled, and all its drafts accepted.
            self.known[slot] = first + int(rng.integers(1, count + 6))
            self.state.num_tokens[slot] = self.known[slot]
            for ahead in range(count):
                self.buffers.by_token[POSITIONS.value, row + ahead] = 0 if self.idle[index] else first + ahead
            self._sequence(index, slot, row, 0 if self.idle[index] else first + count)
            row += count
        for index in range(num_seqs, self.sizes.num_seqs):
            self._sequence(index, -1, row, 0)
            row = min(row + 1, self.sizes.num_tokens)
        self.buffers.by_seq[QUERY_START_LOC.value, self.sizes.num_seqs] = row

    def _sequence(self, index: int, slot: int, start: int, length: int) -> None:
        self.buffers.by_seq[QUERY_START_LOC.value, index] = start
        self.buffers.by_seq[SEQ_LENS.value, index] = length
        self.buffers.by_seq[SEQ_SLOTS.value, index] = slot


@pytest.mark.parametrize("seed", range(4))
def test_each_row_reads_the_token_behind_its_own(device: torch.device, seed: int) -> None:
    step, expected = Step(seed, device), []
    for slot, count, first, idle in zip(step.slots, step.counts, step.firsts, step.idle, strict=True):
        behind = range(first + 1, first + count + 1)
        expected += [0 if idle or place >= step.known[slot] else slot * 1000 + place for place in behind]
    expected += [0] * (step.sizes.num_tokens - len(expected))
    read_next_tokens(step.state, step.buffers, step.sizes)
    found = step.buffers.by_token[TOKEN_IDS.value]
    assert found[: len(expected)].tolist() == expected
    assert (found[len(expected) :] == 7).all()


@pytest.mark.parametrize("seed", range(4))
def test_the_row_before_the_last_token_is_kept(device: torch.device, seed: int) -> None:
    step = Step(seed, device)
    rows = torch.arange(step.sizes.num_tokens, device=device)[:, None].expand(-1, HIDDEN).float().contiguous()
    results = torch.full((NUM_SLOTS, HIDDEN), -5.0, device=device)
    expected, start = [-5] * NUM_SLOTS, 0
    for slot, count, first, idle in zip(step.slots, step.counts, step.firsts, step.idle, strict=True):
        ahead = step.known[slot] - 2 - first
        if not idle and 0 <= ahead < count:
            expected[slot] = start + ahead
        start += count
    keep_results(rows, results, step.state, step.buffers, step.sizes)
    assert results[:, 0].tolist() == expected
    assert torch.equal(results, results[:, :1].expand_as(results))


def test_wrong_arguments_are_named(device: torch.device) -> None:
    step = Step(0, device)
    state, buffers, sizes = step.state, step.buffers, StepSizes(2, 1, 0, 0)
    rows, results = torch.zeros(2, HIDDEN, device=device), torch.zeros(NUM_SLOTS, HIDDEN, device=device)
    large = StepSizes(65, 1, 0, 0)
    for message, wrong in (
        ("sizes: .* are not within", lambda: read_next_tokens(state, buffers, large)),
        ("sizes: .* are not within", lambda: keep_results(rows, results, state, buffers, large)),
        ("rows must be contiguous", lambda: keep_results(rows[:1], results, state, buffers, sizes)),
        ("rows must be contiguous", lambda: keep_results(rows.half(), results, state, buffers, sizes)),
        ("results must be contiguous", lambda: keep_results(rows, results[:3], state, buffers, sizes)),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
