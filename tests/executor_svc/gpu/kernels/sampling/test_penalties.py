"""Token counts on the device: restarted from token ids, added to, and left alone where nothing counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.gpu.kernels.sampling.penalties import add_tokens, restart_counts
from executor_svc.gpu.kernels.sampling.state import RECORD_WORDS, SamplingState
from tests.helpers.executor.device_sampling import sequence, world

PENALTIES = {"repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": 0.5}


def counted(vocab: int, prompt: list[int], output: list[int]) -> list[int]:
    counts = 2 * np.bincount(output, minlength=vocab)
    counts[prompt] |= 1
    return counts.tolist()


@pytest.mark.parametrize("vocab", [31, 4097])
def test_counts_are_those_of_the_token_ids(device: torch.device, vocab: int) -> None:
    last = vocab - 1
    prompt, output = [1, 1, 2, last], [2, 5, 5, last, 5]
    w = world(vocab, [sequence(0, prompt, output, **PENALTIES), sequence(1, prompt, output)], device)
    assert w.state.counts[0].tolist() == counted(vocab, prompt, output)
    assert not w.state.counts[1:].any()


@settings(max_examples=12)
@given(data=st.data(), vocab=st.integers(1, 300), num_slots=st.integers(1, 4))
def test_any_tokens_of_any_slots(device: torch.device, data: st.DataObject, vocab: int, num_slots: int) -> None:
    """Counted when they are admitted, some more of some slots added then, in any order of rows."""
    ids = st.integers(0, vocab - 1)
    texts = [
        (data.draw(st.lists(ids, min_size=1, max_size=20)), data.draw(st.lists(ids, max_size=20)))
        for _ in range(num_slots)
    ]
    w = world(vocab, [sequence(slot, *text, **PENALTIES) for slot, text in enumerate(texts)], device)
    rows = data.draw(st.permutations(range(num_slots)))
    taken = [data.draw(st.integers(-1, vocab - 1)) for _ in rows]
    add_tokens(w.state.counts, w.ints(rows), torch.tensor(taken, device=device), w.state.records)
    for slot, token in zip(rows, taken, strict=True):
        prompt, output = texts[slot]
        assert w.state.counts[slot].tolist() == counted(vocab, prompt, [*output, *([token] if token >= 0 else [])])


def test_a_slots_next_owner_starts_anew(device: torch.device) -> None:
    w = world(40, [sequence(0, [1], [2, 2], **PENALTIES), sequence(1, [3], [4], **PENALTIES)], device)
    state = w.state
    state.counts[1] = 99
    state.token_ids[0, :4] = w.ints([9, 9, 8, 39])
    state.num_tokens[0], state.num_prompt_tokens[0] = 3, 2
    restart(state, w.ints([-1, 0]), max_tokens=3)
    # The token behind the known ones is not read; a slot that is not named, and padding, stay.
    assert state.counts[0].tolist() == counted(40, [9, 9], [8])
    assert state.counts[1].tolist() == [99] * 40
    restart(state, w.ints([]), max_tokens=3)


def restart(state: SamplingState, slots: torch.Tensor, max_tokens: int) -> None:
    restart_counts(
        state.counts, slots, state.records, state.token_ids, state.num_tokens, state.num_prompt_tokens, max_tokens
    )


def test_sampled_tokens_are_added(device: torch.device) -> None:
    penalised = [sequence(i, [1], [2], **PENALTIES) for i in range(4)]
    w = world(30, [*penalised, sequence(4, [1], [2])], device)
    tokens = torch.tensor([2, -1, 7, 29, 5], device=device)
    add_tokens(w.state.counts, w.ints([3, 1, -1, 0, 4]), tokens, w.state.records)
    assert w.state.counts[3].tolist() == counted(30, [1], [2, 2])
    assert w.state.counts[0].tolist() == counted(30, [1], [2, 29])
    assert w.state.counts[1].tolist() == w.state.counts[2].tolist() == counted(30, [1], [2])
    assert not w.state.counts[4].any()


def test_more_rows_than_one_program_takes(device: torch.device) -> None:
    n = 130
    counts = torch.zeros((n, 8), dtype=torch.int32, device=device)
    records = torch.ones((n, RECORD_WORDS), dtype=torch.int32, device=device)
    rows = torch.arange(n, dtype=torch.int32, device=device)
    add_tokens(counts, rows, torch.arange(n, device=device) % 8, records)
    assert counts.argmax(dim=1).tolist() == [i % 8 for i in range(n)]
    assert counts.sum(dim=1).tolist() == [2] * n


def test_arguments_are_checked(device: torch.device) -> None:
    w = world(30, [sequence(0)], device)
    with pytest.raises(ValueError, match=r"tokens must be contiguous torch.int64 \[1\]"):
        add_tokens(w.state.counts, w.ints([0]), w.ints([0]), w.state.records)
    with pytest.raises(ValueError, match="max_tokens 99 is not 0 to 49"):
        restart(w.state, w.ints([0]), max_tokens=99)
