"""The kernels around the slots' state at the edges of their tiles, with poison in every place that must not be read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor_svc.batch.step_result import WRONG_STATE
from executor_svc.gpu.kernels.slots import commit, draft_layout, ngram_drafts, slot_updates, slots, step_inputs
from executor_svc.gpu.kernels.slots.commit import IDLE, commit_step
from executor_svc.gpu.kernels.slots.slot_updates import RUN_WORDS, UpdateCounts, apply_updates
from executor_svc.gpu.kernels.slots.slots import STATE_FAILED, SlotState, StepBuffers, StepInputs, StepSizes
from executor_svc.gpu.kernels.slots.step_inputs import build_step
from executor_svc.gpu.slots.staging import StagedChanges

POISON = -(2**31)
BLOCK = 8


def ints(values: list[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.int32)).to(device)


# ---------------------------------------------------------------- updates


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_updates_at_the_edges_of_tiles(device: torch.device, extra: int) -> None:
    state = SlotState.empty(300, 64, 40, 5, device, 4000)
    state.words.fill_(POISON)
    state.num_tokens[:] = 39
    lengths = [RUN_WORDS + extra, 2 * RUN_WORDS + extra]
    num_singles, num_given = 256 + extra, 256 + extra
    values = np.random.default_rng(0).integers(-(2**31), 2**31, sum(lengths) + num_singles)
    place = state.extra.storage_offset()
    changes = StagedChanges()
    changes.write(place, values[: lengths[0]])
    changes.write(place + lengths[0], values[lengths[0] : sum(lengths)])
    changes.write_singles(place + np.arange(sum(lengths), len(values)), values[sum(lengths) :])
    given_slots = np.random.default_rng(1).permutation(300)[:num_given]
    changes.give_tokens(given_slots, given_slots + 1000)
    buffer = np.full(5 + changes.num_words() + 3, POISON, np.int32)
    counts = changes.pack(buffer, 5)
    wanted = state.words.cpu().numpy().copy()
    wanted[place : place + len(values)] = values
    apply_updates(torch.from_numpy(buffer).to(device), counts, state)
    numbers = np.full(300, 39)
    numbers[given_slots] = 40
    assert state.num_tokens.tolist() == numbers.tolist()
    assert state.token_ids[given_slots.tolist(), 39].tolist() == (given_slots + 1000).tolist()
    state.num_tokens[:] = 39
    state.token_ids[given_slots.tolist(), 39] = POISON
    assert np.array_equal(state.words.cpu().numpy(), wanted)


def test_a_full_history_takes_no_token(device: torch.device) -> None:
    state = SlotState.empty(2, 64, 3, 1, device)
    state.num_tokens[:] = ints([3, 4], device)
    apply_updates(ints([0, 1, 7, 7], device), UpdateCounts(0, 0, 0, 2), state)
    assert state.num_tokens.tolist() == [4, 4]
    assert state.token_ids.tolist() == [[0, 0, 0, 7], [0, 0, 0, 0]]


# ---------------------------------------------------------------- step inputs


def poisoned(most: StepSizes, max_blocks: int, device: torch.device) -> StepBuffers:
    buffers = StepBuffers.empty(most, max_blocks, device)
    for each in (buffers.by_token, buffers.by_seq, buffers.by_row, buffers.logits_rows, buffers.results, buffers.taken):
        each.fill_(POISON)
    return buffers


def filled(num_slots: int, max_model_len: int, device: torch.device) -> SlotState:
    """Slots in the middle of sequences, every third stopped; slot i has token i * 10000 + p at position p."""
    max_blocks = -(-max_model_len // BLOCK)
    state = SlotState.empty(num_slots, 64, max_model_len, max_blocks, device)
    slot = torch.arange(num_slots, dtype=torch.int32, device=device)[:, None]
    state.token_ids[:] = slot * 10000 + torch.arange(max_model_len + 1, dtype=torch.int32, device=device)
    state.block_tables[:] = slot * 7 + torch.arange(max_blocks, dtype=torch.int32, device=device)
    state.stopped[:] = (slot[:, 0] % 3 == 2).int()
    state.num_prompt_tokens[:] = slot[:, 0] % 5 + 1
    state.max_len[:] = 2**31 - 1
    return state


def staged(seqs: list[tuple[int, int]], sizes: StepSizes, device: torch.device) -> torch.Tensor:
    """The words of a step for sequences of (slot, tokens), of which all sample; poison behind."""
    slots, counts = [slot for slot, _ in seqs], [count for _, count in seqs]
    spare = sizes.num_seqs - len(seqs)
    starts = np.cumsum([0, *counts, *[int(i < sizes.num_tokens - sum(counts)) for i in range(spare)]])
    empty = [-1] * (sizes.num_rows - len(seqs))
    rows = [*slots, *empty, *slots, *empty, *range(len(seqs)), *[0] * len(empty), *[0] * sizes.num_rows]
    logits = np.zeros(sizes.num_logits, np.int64)
    logits[: len(seqs)] = starts[1 : len(seqs) + 1] - 1
    return ints([*slots, *[-1] * spare, *starts, *logits, *rows, *[POISON] * 9], device)


def check_inputs(got: StepInputs, state: SlotState, seqs: list[tuple[int, int]]) -> None:
    """By loops over sequences and tokens."""
    computed, stopped = state.num_computed_tokens.tolist(), state.stopped.tolist()
    tables, prompts = state.block_tables.tolist(), state.num_prompt_tokens.tolist()
    tokens: list[tuple[int, ...]] = []
    for index, (slot, count) in enumerate(seqs):
        live = not stopped[slot]
        end = computed[slot] + count if live else 0
        assert got.seq_lens[index].item() == end
        assert got.rows[index].item() == (slot if live else -1)
        num_blocks = -(-end // BLOCK)
        assert got.block_tables[index, :num_blocks].tolist() == tables[slot][:num_blocks]
        for p in range(computed[slot], computed[slot] + count):
            written = tables[slot][p // BLOCK] * BLOCK + p % BLOCK
            row = (slot * 10000 + p, p, written, max(prompts[slot], p + 1))
            tokens.append(row if live else (0, 0, -1, 1))
    tokens += [(0, 0, -1, 1)] * (got.sizes.num_tokens - len(tokens))
    columns = [column.tolist() for column in (got.token_ids, got.positions, got.slot_mapping, got.rope_lens)]
    assert list(zip(*columns, strict=True)) == tokens
    assert not got.seq_lens[len(seqs) :].any()
    assert (got.rows[len(seqs) :] == -1).all()
    assert got.sources.tolist() == [*range(len(seqs)), *[0] * (got.sizes.num_rows - len(seqs))]


@pytest.mark.parametrize("num_seqs", [1, 127, 128, 129])
@pytest.mark.parametrize("padding", [0, 3])
def test_decodes_at_the_edges_of_tiles(device: torch.device, num_seqs: int, padding: int) -> None:
    state = filled(num_seqs + 2, 40, device)
    state.num_computed_tokens[:] = torch.arange(num_seqs + 2, device=device).int() % 40
    state.num_tokens[:] = state.num_computed_tokens + 1
    sizes = StepSizes.decode(num_seqs + padding)
    buffers = poisoned(sizes, 5, device)
    seqs = [(num_seqs + 1 - i, 1) for i in range(num_seqs)]
    build_step(staged(seqs, sizes, device), state, buffers, sizes, BLOCK, one_each=True)
    got = buffers.inputs(sizes)
    check_inputs(got, state, seqs)
    assert got.query_start_loc.tolist() == list(range(sizes.num_seqs + 1))
    by_token = buffers.by_token.clone()
    build_step(staged(seqs, sizes, device), state, buffers, sizes, BLOCK, one_each=False)
    assert torch.equal(buffers.by_token, by_token), "a step of one token each is a step like others"


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chunks=st.lists(st.tuples(st.integers(0, 30), st.sampled_from([1, 1, 2, 63, 64, 127, 128, 129])), max_size=6),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_chunks_at_the_edges_of_tiles(
    device: torch.device, chunks: list[tuple[int, int]], padding: tuple[int, int]
) -> None:
    state = filled(8, 160, device)
    seqs = [(7 - i, count) for i, (_, count) in enumerate(chunks)]
    for (slot, count), (context, _) in zip(seqs, chunks, strict=True):
        state.num_computed_tokens[slot], state.num_tokens[slot] = context, context + count
    total = sum(count for _, count in seqs)
    sizes = StepSizes(total + padding[0], len(seqs) + padding[1], len(seqs), len(seqs) + padding[0])
    buffers = poisoned(sizes, 20, device)
    build_step(staged(seqs, sizes, device), state, buffers, sizes, BLOCK, one_each=False)
    got = buffers.inputs(sizes)
    check_inputs(got, state, seqs)
    positions = [0 if row < 0 else state.num_tokens[row].item() for row in got.rows.tolist()]
    assert got.sample_positions.tolist() == positions
    assert got.logits_rows.tolist() == (np.cumsum([count for _, count in seqs], dtype=np.int64) - 1).tolist()


@pytest.mark.parametrize("num_blocks", [1023, 1024, 1025, 2049])
@pytest.mark.parametrize("num_seqs", [1, 130])
def test_long_block_tables(device: torch.device, num_blocks: int, num_seqs: int) -> None:
    """Tables of more than a tile, shared by programs or not; nothing behind the sequence's blocks is touched."""
    state = filled(3, 2060 * BLOCK, device)
    state.num_computed_tokens[1] = num_blocks * BLOCK - 1
    sizes = StepSizes.decode(num_seqs)
    buffers = poisoned(sizes, 2060, device)
    buffers.block_tables.fill_(POISON)
    seqs = [(2, 1)] * (num_seqs - 1) + [(1, 1)]
    build_step(staged(seqs, sizes, device), state, buffers, sizes, BLOCK, one_each=True)
    tables = buffers.block_tables.cpu()
    assert tables[-1, :num_blocks].tolist() == state.block_tables[1, :num_blocks].tolist()
    # Up to three entries more make whole accesses of 16 bytes.
    assert (tables[-1, -(-num_blocks // 4) * 4 :] == POISON).all()
    assert (tables[:-1] == POISON).all(), "a slot that has stopped needs no table"


# ---------------------------------------------------------------- commit


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_commit_row_by_row(device: torch.device, dtype: torch.dtype) -> None:
    """Rows: a token, a stop id, one too early, an error, a failed prompt, one that waits, forks, idle, none."""
    num_slots, stop_id = 16, 63
    state = filled(num_slots, 40, device)
    state.stopped[:] = 0
    state.stopped[8] = 1
    state.num_tokens[:] = 20
    state.num_prompt_tokens[:] = 18
    state.num_computed_tokens[:] = 15
    state.stop_bits[1:, stop_id // 32] = -(2**31)
    state.min_tokens[:] = 3
    state.min_tokens[3] = 4
    state.prompt_failed[5] = 1
    slots_of_rows = [1, 2, 3, 4, 5, 6, 7, 8, 9, -1]
    source_slots = [1, 2, 3, 4, 5, 6, 1, 8, 8, -1]
    sources = [0, 1, 2, 3, 4, 5, 0, 6, 6, 0]
    waits = [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    seqs = [1, 2, 3, 4, 5, 6, 8, 10, -1]
    sizes = StepSizes(50, 9, 7, 10)
    starts = [0, 5, 10, 15, 20, 25, 30, 35, 37, 37]
    uploaded = [*seqs, *starts, *[0] * 7, *slots_of_rows, *source_slots, *sources, *waits]
    buffers = poisoned(sizes, 5, device)
    build_step(ints(uploaded, device), state, buffers, sizes, BLOCK, one_each=False)
    before = state.token_ids.tolist()
    far = 2**31 - 1
    tokens = torch.tensor([7, stop_id, stop_id, far, 7, far, 8, far, far, far], dtype=dtype, device=device)
    errors = ints([0, 0, 0, 4, 0, 0, 0, 3, 3, 3], device)
    commit_step(tokens, errors, state, buffers, sizes)
    taken = [7, 63, 63, -1, -1, -1, 8, -1, -1, -1]
    assert buffers.inputs(sizes).taken.tolist() == taken
    assert buffers.results[:30].view(3, 10).tolist() == [
        taken, [0, 0, 0, 4, 1, 0, 0, IDLE, IDLE, IDLE], [20] * 7 + [0] * 3
    ]  # fmt: skip
    assert np.flatnonzero(state.stopped.tolist()).tolist() == [2, 4, 5, 8, 9]
    assert state.num_tokens.tolist() == [20, 21, 21, 21, 20, 20, 20, 21] + [20] * 8
    # Slot 10 computes without sampling; 8 and its fork compute nothing.
    assert state.num_computed_tokens.tolist() == [15, 20, 20, 20, 20, 20, 20, 20, 15, 15, 17] + [15] * 5
    for slot, token in ((1, 7), (2, 63), (3, 63), (7, 8)):
        before[slot][20] = token
    assert state.token_ids.tolist() == before


def test_a_slot_whose_state_stood_elsewhere_says_so_whatever_else_failed(device: torch.device) -> None:
    state, sizes = filled(5, 40, device), StepSizes.decode(4)
    state.stopped[:] = 0
    state.num_tokens[:] = 11
    state.num_computed_tokens[:] = 10
    # Prompt rows that were not finite are counted to it.
    state.prompt_failed[1:4] = ints([STATE_FAILED.value, STATE_FAILED.value + 40, 40], device)
    buffers = poisoned(sizes, 5, device)
    build_step(staged([(slot, 1) for slot in range(4)], sizes, device), state, buffers, sizes, BLOCK, one_each=True)
    commit_step(ints([7, 7, -1, 7], device).long(), ints([0, 0, 1, 0], device), state, buffers, sizes)
    assert buffers.results[4:8].tolist() == [0, WRONG_STATE, WRONG_STATE, 1]
    assert state.stopped.tolist() == [0, 1, 1, 1, 0]


@pytest.mark.parametrize("num_rows", [127, 128, 129])
def test_commits_at_the_edges_of_tiles(device: torch.device, num_rows: int) -> None:
    state = filled(num_rows, 40, device)
    state.num_tokens[:] = 11
    state.num_computed_tokens[:] = 10
    sizes = StepSizes.decode(num_rows)
    buffers = poisoned(sizes, 5, device)
    seqs = [(slot, 1) for slot in range(num_rows)]
    build_step(staged(seqs, sizes, device), state, buffers, sizes, BLOCK, one_each=True)
    live = (state.stopped == 0).tolist()
    tokens = torch.arange(num_rows, device=device) % 64
    commit_step(tokens, torch.zeros(num_rows, dtype=torch.int32, device=device), state, buffers, sizes)
    assert state.num_tokens.tolist() == state.num_computed_tokens.add(1).tolist() == [11 + each for each in live]
    taken = [token if each else -1 for token, each in zip(tokens.tolist(), live, strict=True)]
    assert buffers.results[:num_rows].tolist() == buffers.taken[:num_rows].tolist() == taken
    assert (buffers.results[3 * num_rows :] == POISON).all()
    assert state.token_ids[:, 11].tolist() == [
        token if token >= 0 else slot * 10000 + 11 for slot, token in enumerate(taken)
    ]


# ---------------------------------------------------------------- what can not be


def test_wrong_arguments_are_named(device: torch.device) -> None:
    state, sizes = filled(4, 40, device), StepSizes.decode(2)
    buffers = poisoned(sizes, 5, device)
    staging = staged([(0, 1)], sizes, device)
    tokens, errors = torch.zeros(2, dtype=torch.int64, device=device), ints([0, 0], device)

    def build(staging=staging, sizes=sizes, block_size=BLOCK, one_each=True):
        build_step(staging, state, buffers, sizes, block_size, one_each)

    def take(tokens=tokens, errors=errors, sizes=sizes):
        commit_step(tokens, errors, state, buffers, sizes)

    for message, wrong in (
        ("staging must be contiguous torch.int32", lambda: build(staging.long())),
        (f"staging has {sizes.num_words - 1} words", lambda: build(staging[: sizes.num_words - 1])),
        ("sizes: ", lambda: build(sizes=StepSizes.decode(3))),
        ("sizes: ", lambda: build(sizes=replace(sizes, num_rows=-1))),
        ("one_each: 2 sequences have 1 tokens", lambda: build(sizes=replace(sizes, num_tokens=1))),
        ("block_size must be at least 1", lambda: build(block_size=0)),
        ("tokens must be contiguous", lambda: take(tokens[:1])),
        ("tokens must be contiguous", lambda: take(tokens.float())),
        ("errors must be contiguous torch.int32", lambda: take(errors=errors.long())),
        ("sizes: ", lambda: take(sizes=StepSizes.decode(3))),
        ("staging must be contiguous torch.int32", lambda: apply_updates(tokens, UpdateCounts(0, 0, 0, 0), state)),
        ("counts: ", lambda: apply_updates(staging, UpdateCounts(0, 0, len(staging), 0), state)),
        ("counts: ", lambda: apply_updates(staging, UpdateCounts(0, 0, -1, 0), state)),
        ("num_slots 40000, max_model_len 60000: ", lambda: SlotState.empty(40000, 64, 60000, 1, device)),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_few_variants_are_quick() -> None:
    modules = (slot_updates, step_inputs, commit, ngram_drafts, draft_layout)
    variants = [variant for module in modules for variant in module.variants()]
    assert sum(variant.quick for variant in variants) == 5
    assert all(variant.no_spills for variant in variants)
    assert not hasattr(slots, "variants")
