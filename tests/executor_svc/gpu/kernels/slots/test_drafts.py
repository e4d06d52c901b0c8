"""Drafts of n-grams against the source on the host, and the layout of a step without those that were not made."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor_svc.batch.slots import Slots
from executor_svc.gpu.kernels.slots.draft_layout import lay_out_drafts
from executor_svc.gpu.kernels.slots.ngram_drafts import draft_ngrams
from executor_svc.gpu.kernels.slots.slots import SlotState, StepBuffers, StepSizes
from executor_svc.plan.limits import Limits
from executor_svc.speculation.ngram import NgramSource

POISON = -(2**31)
MANY = 2**31 - 1


def ints(values: list[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.int32)).to(device)


def texts_on(device: torch.device, texts: list[list[int]], max_drafts: int = 64) -> SlotState:
    """Slots in the middle of these texts, all but the last token computed, with room for any drafts."""
    state = SlotState.empty(len(texts), 64, max(map(len, texts)) + 80, 5, device)
    state.words.fill_(POISON)
    state.stopped[:] = 0
    state.max_drafts[:] = max_drafts
    state.drafts_end[:] = MANY
    for slot, text in enumerate(texts):
        state.token_ids[slot, : len(text)] = ints(text, device)
        state.num_tokens[slot], state.num_computed_tokens[slot] = len(text), len(text) - 1
    return state


def staged(seqs: list[tuple[int, int]], sizes: StepSizes, most: int, device: torch.device) -> torch.Tensor:
    """The words of sequences (slot, tokens); rows and logits rows are numbered, whatever they are for."""
    spare = sizes.num_seqs - len(seqs)
    starts = np.cumsum([0, *(count for _, count in seqs), *[1] * spare])
    others = [*range(sizes.num_logits), *range(4 * sizes.num_rows)]
    return ints([*(slot for slot, _ in seqs), *[-1] * spare, *starts, *others, most, *[POISON] * 9], device)


def drafts_of(state: SlotState, slot: int) -> list[int]:
    known = int(state.num_tokens[slot])
    return state.token_ids[slot, known : known + int(state.num_drafts[slot])].tolist()


def wanted_drafts(texts: list[list[int]], most: list[int]) -> list[list[int]]:
    """What the source on the host drafts for these texts."""
    width = max(map(len, texts))
    slots = Slots(Limits(len(texts), 1, 1, width, 64, 0, 8, 1, 0, 1, max_drafts=64))
    source = NgramSource(slots.limits, max_indexed=10**6)
    for slot, text in enumerate(texts):
        slots.token_ids[slot, : len(text)] = text
        slots.num_tokens[slot] = len(text)
        source.admitted(slot, 0)
    drafts = source.propose(slots, np.arange(len(texts)), np.array(most))
    return [part.tolist() for part in np.split(drafts.token_ids, drafts.counts.cumsum()[:-1])]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 8)), min_size=1, max_size=4)
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_drafts_are_those_of_the_source_on_the_host(device: torch.device, cases: list[tuple[list[int], int]]) -> None:
    texts, most = [text for text, _ in cases], [count for _, count in cases]
    state = texts_on(device, texts)
    state.max_drafts[:] = ints(most, device)
    sizes = StepSizes.decode(len(texts), 8)
    draft_ngrams(staged([(slot, 9) for slot in range(len(texts))], sizes, 8, device), state, sizes)
    assert [drafts_of(state, slot) for slot in range(len(texts))] == wanted_drafts(texts, most)


@pytest.mark.parametrize("length", [2047, 2048, 2049, 2050, 4097, 4098])
def test_matches_at_the_edges_of_tiles(device: torch.device, length: int) -> None:
    """A match at the beginning, one across a tile's edge, one of two tokens near the end, and none."""
    end = [1, 2, 3, 4]
    rng = np.random.default_rng(length)
    first, across, short, none = (rng.integers(10, 60, length - 4).tolist() for _ in range(4))
    first[:5] = [*end, 5]
    across[2046:2051] = [*end, 6] if length > 2060 else across[2046:2051]
    short[-9:-6], short[30:34] = [3, 4, 7], [0, 3, 4, 8]
    texts = [[*text, *end] for text in (first, across, short, none)]
    state, sizes = texts_on(device, texts), StepSizes.decode(4, 3)
    draft_ngrams(staged([(slot, 4) for slot in range(4)], sizes, 3, device), state, sizes)
    found = [drafts_of(state, slot) for slot in range(4)]
    assert found == wanted_drafts(texts, [3] * 4)
    assert (found[0][0], found[2][0], found[3]) == (5, 7, [])


def test_who_has_how_many(device: torch.device) -> None:
    """By the step's places, its most, the slot's most and end; none: a prompt, a slot that has stopped, padding."""
    texts = [[5] * 6 for _ in range(8)]
    state = texts_on(device, texts)
    state.max_drafts[2] = 1
    state.drafts_end[3], state.drafts_end[4] = 8, 6
    state.stopped[5] = 1
    state.num_computed_tokens[6] = 1
    seqs = [(0, 4), (1, 7), (2, 7), (3, 7), (4, 7), (5, 7), (6, 5)]
    sizes = StepSizes(50, 8, 9, 8, 6)
    before = state.token_ids.clone()
    draft_ngrams(staged(seqs, sizes, 5, device), state, sizes)
    assert state.num_drafts.tolist() == [3, 5, 1, 2, 0, 0, 0, POISON]
    for slot in range(7):
        assert drafts_of(state, slot) == [5] * int(state.num_drafts[slot])
        state.token_ids[slot, 6 : 6 + int(state.num_drafts[slot])] = POISON
    assert torch.equal(state.token_ids, before)


@pytest.mark.parametrize("num_seqs", [1, 63, 64, 65, 130])
def test_places_of_drafts_that_were_not_made_are_left_out(device: torch.device, num_seqs: int) -> None:
    """Decodes with drafts, parts of prompts, whole prompts and slots that have stopped, padding behind."""
    rng = np.random.default_rng(num_seqs)
    state = texts_on(device, [[1] * 20 for _ in range(num_seqs)])
    made = rng.integers(0, 4, num_seqs)
    prompts, stopped = rng.random(num_seqs) < 0.3, rng.random(num_seqs) < 0.1
    made[prompts | stopped] = 0
    state.num_drafts[:] = ints(made, device)
    state.num_computed_tokens[:] = ints(np.where(prompts, 11, np.where(stopped, 20, 19)), device)
    planned = np.where(prompts, rng.integers(1, 10, num_seqs), 4)
    seqs, padding = list(enumerate(planned.tolist())), 3
    num_tokens = int(planned.sum()) + padding
    sizes = StepSizes(num_tokens, num_seqs + padding, num_tokens - padding, num_seqs, 3)
    words, buffers = staged(seqs, sizes, 3, device), StepBuffers.empty(sizes, 5, device)
    buffers.words.fill_(POISON)
    lay_out_drafts(words, state, buffers, sizes)
    kept = [*np.where(prompts, planned, 1 + made).tolist(), *[1] * padding]
    starts = np.cumsum([0, *kept])
    # Each logits row is a place of the words' layout; behind the drafts that were made it is the last of them.
    logits = [int(starts[i]) + min(j, kept[i] - 1) for i, (_, count) in enumerate(seqs) for j in range(count)]
    begin = 2 * sizes.num_seqs + 1
    found = buffers.words[: sizes.num_words].tolist()
    assert found[: sizes.num_seqs] == words[: sizes.num_seqs].tolist()
    assert found[sizes.num_seqs : begin] == starts.tolist()
    assert found[begin : begin + sizes.num_logits] == logits
    end = sizes.num_words - 1
    assert found[begin + sizes.num_logits : end] == words[begin + sizes.num_logits : end].tolist()
    assert all(after >= before for before, after in pairwise(starts))


def test_wrong_arguments_are_named(device: torch.device) -> None:
    state, sizes = texts_on(device, [[1, 2]]), StepSizes.decode(1, 2)
    buffers, words = StepBuffers.empty(sizes, 5, device), staged([(0, 3)], sizes, 2, device)
    for message, wrong in (
        ("staging must be contiguous torch.int32", lambda: draft_ngrams(words.long(), state, sizes)),
        ("staging has 3 words", lambda: draft_ngrams(words[:3], state, sizes)),
        ("shortest 0 and longest 4", lambda: draft_ngrams(words, state, sizes, 0)),
        ("shortest 2 and longest 8", lambda: draft_ngrams(words, state, sizes, 2, 8)),
        ("sizes: 65 drafts", lambda: draft_ngrams(torch.zeros(999).int(), state, StepSizes.decode(1, 65))),
        ("staging must be contiguous torch.int32", lambda: lay_out_drafts(words.long(), state, buffers, sizes)),
        ("staging has 3 words", lambda: lay_out_drafts(words[:3], state, buffers, sizes)),
        ("sizes: ", lambda: lay_out_drafts(words, state, buffers, StepSizes.decode(2, 2))),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
