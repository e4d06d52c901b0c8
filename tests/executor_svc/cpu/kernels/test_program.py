"""Recorded operations, replayed on steps of any size: the bits that the same operations give one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from executor_svc.batch.forward_batch import ForwardBatch
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.linear import CpuLinear
from executor_svc.cpu.kernels.workspace import Workspace
from executor_svc.device.kernels import AttentionPlan, AttentionShape, Rope
from tests.executor_svc.cpu.kernels.bits import equal_bits
from tests.executor_svc.driver import flat_batch

SHAPE = AttentionShape(4, 2, 20, 32, 0.2)
HIDDEN, BLOCKS, BLOCK, MOST = 40, 30, 8, 60


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Layer:
    """A layer with all that is in one, and the memory that it works on."""

    kernels: CpuKernels
    dtype: torch.dtype

    def __post_init__(self) -> None:
        def linear(seed: int, outer: int, inner: int) -> CpuLinear:
            return CpuLinear(randn(seed, outer, inner).to(self.dtype) / 5, None, self.kernels)

        self.table, self.norm = randn(0, 50, HIDDEN).to(self.dtype), randn(1, HIDDEN).to(self.dtype)
        self.qkv, self.output = linear(2, 8 * 32, HIDDEN), linear(3, HIDDEN, 4 * 32)
        self.gate_up, self.down = linear(4, 66, HIDDEN), linear(5, HIDDEN, 33)
        self.cache = torch.full((BLOCKS, 2, 2, BLOCK, 32), float("nan"), dtype=self.dtype)

    def compute(self, ids: Tensor, rope: Rope, plan: AttentionPlan) -> Tensor:
        """Hidden states of one layer."""
        kernels = self.kernels
        residual = kernels.embed(self.table, ids, 1.5)
        qkv = self.qkv(kernels.rms_norm(residual, self.norm, 1e-5))
        q = kernels.rope_write_kv(qkv, rope, self.cache, SHAPE, plan)
        attended = self.output(kernels.attention(q, self.cache, SHAPE, plan))
        normed, residual = kernels.add_rms_norm(attended, residual, self.norm, 1e-5)
        return kernels.add(self.down(kernels.silu_mul(self.gate_up(normed))), residual)


def draw_step(rng: random.Random, most: int) -> ForwardBatch:
    """A few sequences of at most `most` tokens together, each of blocks of its own, all computed anew."""
    chunks, left = [], most
    while left and len(chunks) < 6:
        chunks.append((0, rng.randint(1, min(left, 4 * BLOCK))))
        left -= chunks[-1][1]
    free = rng.sample(range(BLOCKS), BLOCKS)
    tables = [[free.pop() for _ in range(-(-count // BLOCK))] for _, count in chunks]
    return flat_batch(chunks, tables, BLOCK, [rng.randrange(50) for _ in range(sum(count for _, count in chunks))])


def angles(batch: ForwardBatch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turns = batch.positions[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    return turns.cos().repeat(1, 2).to(dtype), torch.cat([-turns.sin(), turns.sin()], 1).to(dtype)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replays_of_any_size(num_threads: int, dtype: torch.dtype) -> None:
    """Steps large and small in any order; rows beyond a step's stay as the step before left them."""
    rng = random.Random(num_threads)
    layer, alone = Layer(CpuKernels(num_threads), dtype), Layer(CpuKernels(), dtype)
    plan = layer.kernels.new_attention_plan(SHAPE, 4 * BLOCK, MOST)
    ids = torch.zeros(MOST, dtype=torch.int64)
    rope = Rope(torch.zeros(MOST, 8, dtype=dtype), torch.zeros(MOST, 8, dtype=dtype), torch.arange(MOST))
    with layer.kernels.recording() as recording:
        hidden = layer.compute(ids, rope, plan)
        program = recording.program()
    hidden.fill_(7.0)
    for most in (MOST, 1, 2, 30, 59, 13, MOST, 5):
        batch = draw_step(rng, most)
        rows = len(batch.token_ids)
        before = hidden[rows:].clone()
        own = alone.kernels.new_attention_plan(SHAPE, 4 * BLOCK, rows)
        for each in (plan, own):
            each.fill(batch.slot_mapping, batch.query_start_loc, batch.seq_lens, batch.block_tables)
        ids[:rows] = batch.token_ids
        rope.cos[:rows], rope.sin[:rows] = angles(batch, dtype)
        program.run(rows=rows, **{plan.name: plan.num_tiles})
        expected = alone.compute(batch.token_ids, rope, own)
        assert bool(expected.isfinite().all())
        assert equal_bits(hidden[:rows], expected)
        assert equal_bits(hidden[rows:], before)


def test_nothing_runs_while_it_is_recorded() -> None:
    kernels, x = CpuKernels(), randn(0, 4, HIDDEN)
    residual, expected = torch.ones(4, HIDDEN), x + 1
    with kernels.recording() as recording:
        total = kernels.add(x, residual)
        program = recording.program()
    assert bool((residual == 1).all())
    assert total is residual
    program.run(rows=4)
    assert torch.equal(residual, expected)
    program.run(rows=2)
    assert torch.equal(residual[:2], expected[:2] + x[:2])
    assert torch.equal(residual[2:], expected[2:])


def test_numbers_of_rows_by_name() -> None:
    """What comes after the name is changed runs on as many rows as are given by that name."""
    kernels, left, right = CpuKernels(), torch.zeros(6, HIDDEN), torch.zeros(6, HIDDEN)
    one = torch.ones(6, HIDDEN)
    with kernels.recording() as recording:
        kernels.add(one, left)
        recording.rows = "others"
        kernels.add(one, right)
        program = recording.program()
    program.run(rows=5, others=2)
    program.run(rows=1, others=0)
    assert left[:, 0].tolist() == [2, 1, 1, 1, 1, 0]
    assert right[:, 0].tolist() == [1, 1, 0, 0, 0, 0]


def test_a_recording_that_fails_is_forgotten() -> None:
    kernels, x = CpuKernels(), randn(0, 4, HIDDEN)
    with pytest.raises(AssertionError), kernels.recording():
        kernels.add(x, torch.ones(HIDDEN, 4).t())  # whose rows do not lie one after the other
    assert torch.equal(kernels.add(x, torch.ones(4, HIDDEN)), x + 1), "what comes after runs at once"


def test_recorded_results_have_memory_that_stays() -> None:
    """Layers share it: an operation's next result of the same shape takes the place of the last."""
    workspace = Workspace()
    first = workspace.take("normed", (3, 5), torch.float32)
    assert workspace.take("normed", (3, 5), torch.float32) is first
    others = [
        workspace.take("normed", (3, 5), torch.bfloat16),
        workspace.take("normed", (5, 3), torch.float32),
        workspace.take("attended", (3, 5), torch.float32),
    ]
    assert len({first.data_ptr(), *(other.data_ptr() for other in others)}) == 4
    kernels, x, weight = CpuKernels(), randn(0, 4, HIDDEN), torch.ones(HIDDEN)
    with kernels.recording() as recording:
        found = kernels.rms_norm(x, weight, 1e-5)
        assert kernels.rms_norm(x, weight, 1e-6) is found
        recording.rows = "others"
        assert kernels.rms_norm(x, weight, 1e-5) is not found
    assert kernels.rms_norm(x, weight, 1e-5) is not kernels.rms_norm(x, weight, 1e-5)
