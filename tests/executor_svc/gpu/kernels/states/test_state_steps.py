"""Headers of states before and after a step that was built on the device, with padding and slots that have stopped."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from executor_svc.gpu.kernels.slots.slots import (
    NUM_NUMBERS,
    PROMPT_FAILED,
    STATE_FAILED,
    SlotState,
    StepBuffers,
    StepSizes,
)
from executor_svc.gpu.kernels.states.plan import GpuStatePlan
from executor_svc.gpu.kernels.states.saves import SaveTensors
from executor_svc.gpu.states import GpuStateKernels
from executor_svc.plan.state_sizes import LayerState
from tests.executor_svc.gpu.kernels.attention.cases import ARCH
from tests.executor_svc.gpu.kernels.states.test_state_operations import layers
from tests.executor_svc.recurrent import DeltaLayer, StatePages

PAGES, TAIL, NUM_SLOTS = 3, 2, 6


def built(
    device: torch.device,
    sequences: list[tuple[int, int, int]],
    num_tokens: int,
    num_seqs: int,
    saves: dict[int, list[tuple[int, list[int]]]],
    pages_per_state: int = PAGES,
    pages: Tensor | None = None,
) -> tuple[GpuStatePlan, SlotState]:
    """A step as `build_step` leaves it: (slot, context, rows) of each sequence; a context below 0: it has stopped."""
    most = StepSizes(64, 8, 1, 1)
    buffers = StepBuffers.empty(most, 4, device)
    rows = [count for _, _, count in sequences] + [1] * (num_seqs - len(sequences))
    starts = torch.tensor([0, *rows]).cumsum(0).clamp(max=num_tokens).int()
    buffers.by_seq[0, : num_seqs + 1] = starts
    buffers.by_seq[1] = 0
    buffers.by_seq[2] = -1
    for index, (slot, context, count) in enumerate(sequences):
        buffers.by_seq[1, index] = context + count if context >= 0 else 0
        buffers.by_seq[2, index] = slot
    state = SlotState.empty(NUM_SLOTS, 10, 64, 4, device)
    if pages is None:
        pages = torch.arange(NUM_SLOTS * pages_per_state, device=device).int().flip(0)
    tables = pages.view(NUM_SLOTS, pages_per_state)
    words = torch.zeros(SaveTensors.num_words(most.num_seqs, 5, pages_per_state), dtype=torch.int32, device=device)
    written = SaveTensors.of(words, most.num_seqs, 5, pages_per_state)
    every = [(index, each) for index in sorted(saves) for each in saves[index]]
    for at, (_, (position, own)) in enumerate(every):
        written.positions[at] = position
        written.tables[at] = torch.tensor(own)
    written.starts.copy_(torch.tensor([sum(of < index for of, _ in every) for index in range(len(written.starts))]))
    plan = GpuStatePlan(pages_per_state, TAIL, most.num_tokens, most.num_seqs, device)
    plan.read_from(buffers, state, tables, written)
    return plan, state


def test_headers_are_read_and_written(device: torch.device) -> None:
    """A prompt, a decode, a decode of a slot that has stopped, drafts, a chunk, then padding."""
    sequences = [(4, 0, 5), (2, 7, 1), (1, -1, 1), (5, 9, 3), (0, 20, 10)]
    saves = {0: [(2, [20, 21, 22]), (3, [23, 24, 25])], 3: [(9, [26, 27, 28])], 4: [(28, [29, 30, 31])]}
    plan, state = built(device, sequences, 24, 7, saves)
    pool = torch.full((40, 256), 0xFF, dtype=torch.uint8, device=device)
    words = pool.view(torch.int32)
    for slot, stands in ((2, 6), (1, 3), (5, 9), (0, 18)):
        words[plan.step.tables[slot, 0], 0] = stands
    before = words.clone()
    plan.begin(7, 24, pool)
    assert plan.step.folded[:7].tolist() == [0, 6, 0, 9, 18, 0, 0]
    owners = [0] * 5 + [1] + [-1] + [3] * 3 + [4] * 10 + [-1] * 4
    assert plan.step.owners[:24].tolist() == owners
    assert not state.numbers[PROMPT_FAILED.value].any()
    plan.end(pool)
    expected = before.clone()
    for slot, after in ((4, 3), (2, 7), (5, 10), (0, 28)):
        expected[plan.step.tables[slot, 0], 0] = after
    for page, position in ((20, 2), (23, 3), (26, 9), (29, 28)):
        expected[page, 0] = position
    assert torch.equal(words, expected)


def test_saves_beyond_what_the_state_comes_to_have_no_effect(device: torch.device) -> None:
    saves = {0: [(5, [20, 21, 22]), (8, [23, 24, 25])]}
    plan, _ = built(device, [(3, 7, 2)], 2, 1, saves)
    pool = torch.full((40, 128), 0xFF, dtype=torch.uint8, device=device)
    words = pool.view(torch.int32)
    words[plan.step.tables[3, 0], 0] = 6
    before = words.clone()
    plan.begin(1, 2, pool)
    plan.end(pool)
    before[plan.step.tables[3, 0], 0] = 7
    assert torch.equal(words, before)


@pytest.mark.parametrize("stands", [-5, 3, 8, 2**30, -(2**31)])
def test_a_state_that_stands_elsewhere_fails_its_slot(stands: int, device: torch.device) -> None:
    plan, state = built(device, [(2, 7, 1), (3, 4, 1)], 2, 2, {})
    pool = torch.zeros(40, 128, dtype=torch.uint8, device=device)
    words = pool.view(torch.int32)
    words[plan.step.tables[2, 0], 0], words[plan.step.tables[3, 0], 0] = stands, 4
    plan.begin(2, 2, pool)
    assert plan.step.folded[:2].tolist() == [7, 4]
    assert state.numbers.shape[0] == NUM_NUMBERS
    assert state.numbers[PROMPT_FAILED.value].nonzero().tolist() == [[2]]
    assert state.prompt_failed[2] == STATE_FAILED.value


@pytest.mark.parametrize("name", ["taps", "delta", "mamba"])
def test_padding_and_stopped_slots_change_no_page(name: str, device: torch.device) -> None:
    """Their rows are zeros; those of sequences are what they are alone."""
    layer = layers(torch.float32)[name]
    pages = StatePages(layer.state, TAIL, layer.dtype, NUM_SLOTS)
    tables = torch.tensor([pages.new_table() for _ in range(NUM_SLOTS)], dtype=torch.int32, device=device)
    kernels, x = GpuStateKernels(device, ARCH, 8), torch.cat([layer.inputs[0], layer.inputs[1]])[:9]
    many, size = pages.memory.pool.clone(), pages.pages_per_state

    def run(sequences: list[tuple[int, int, int]], inputs: Tensor, num_seqs: int, pool: Tensor) -> Tensor:
        plan, _ = built(device, sequences, len(inputs), num_seqs, {}, size, tables)
        memory = pages.memory._replace(pool=pool)
        plan.begin(num_seqs, len(inputs), pool)
        out = layer.run(kernels, inputs, memory, plan)
        plan.end(pool)
        return out

    found = run([(1, 0, 4), (3, -1, 2), (0, 0, 1)], x, 5, many)
    alone = pages.memory.pool.clone()
    first, last = run([(1, 0, 4)], x[:4], 1, alone), run([(0, 0, 1)], x[6:7], 1, alone)
    torch.testing.assert_close(found[:4], first, rtol=0, atol=0)
    torch.testing.assert_close(found[6:7], last, rtol=0, atol=0)
    assert torch.equal(many.view(torch.int32), alone.view(torch.int32))
    assert not found[4:6].any()
    assert not found[7:].any()


def test_states_of_many_pages_and_heads() -> None:
    """The helper's pages differ from slot to slot: a layer of several units is in several pages."""
    layer = layers(torch.float32)["delta"]
    assert isinstance(layer, DeltaLayer)
    assert isinstance(layer.state, LayerState)
    pages = StatePages(layer.state, TAIL, layer.dtype, 2)
    assert len(set(pages.memory.pages)) > 1
    assert math.isnan(float(pages.memory.pool.view(torch.float32)[0, 0]))
