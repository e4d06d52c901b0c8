"""Recurrent layers and their states in pages, computed in steps that are cut anywhere. For tests only."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from executor_svc.device.states import StateMemory, StateOperations, StatePlan, folded_after
from executor_svc.plan.state_sizes import ConvState, DeltaState, LayerState, MambaState


class StatePages:
    """A pool of pages full of NaN, and the units of one layer in the pages of a state."""

    def __init__(self, layer: LayerState, tail: int, dtype: torch.dtype, num_states: int, seed: int = 0) -> None:
        sizes = layer.unit_bytes(tail, dtype)
        page_bytes = max(*sizes, sum(sizes) // 3, 0) // 64 * 64 + 192
        pages, offsets, page, used = [], [], 0, 64
        for size in sizes:
            if used + size > page_bytes:
                page, used = page + 1, 0
            pages.append(page)
            offsets.append(used)
            used += size
        self.pages_per_state = page + 1
        pool = torch.full((num_states * self.pages_per_state + 1, page_bytes // 4), math.nan)
        self.memory = StateMemory(pool.view(torch.uint8), tuple(pages), tuple(offsets))
        self._free = random.Random(seed).sample(range(len(pool)), len(pool))

    def new_table(self) -> list[int]:
        return [self._free.pop() for _ in range(self.pages_per_state)]

    def copy(self, source: list[int], target: list[int]) -> None:
        self.memory.pool[target] = self.memory.pool[source]


class Layer:
    """The inputs of a layer for all tokens of sequences: numbers by sequence and position."""

    state: LayerState
    dtype: torch.dtype

    def __init__(self, num_seqs: int, length: int, columns: int, dtype: torch.dtype, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.inputs = self.random(num_seqs, length, columns).to(dtype)

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self._generator)

    def noise(self, rows: int) -> Tensor:
        """Return inputs of drafts that are rejected."""
        return self.random(rows, self.inputs.shape[2]).to(self.dtype) * 3

    def run(self, kernels: StateOperations, x: Tensor, memory: StateMemory, plan: StatePlan) -> Tensor:
        """Return the outputs for inputs [T, columns]."""
        raise NotImplementedError


class ConvLayer(Layer):
    """A convolution of some columns."""

    def __init__(
        self,
        state: ConvState,
        *,
        silu: bool,
        biased: bool,
        dtype: torch.dtype,
        num_seqs: int = 2,
        length: int = 40,
        seed: int = 0,
    ) -> None:
        super().__init__(num_seqs, length, state.channels + 8, dtype, seed)
        self.state, self.silu = LayerState(state), silu
        self.weight = self.random(state.width, state.channels).to(dtype)
        self.bias = self.random(state.channels).to(dtype) if biased else None

    def run(self, kernels: StateOperations, x: Tensor, memory: StateMemory, plan: StatePlan) -> Tensor:
        return kernels.causal_conv(x, 8, self.weight, self.bias, self.silu, memory, plan)


class DeltaLayer(Layer):
    """The gated delta rule."""

    def __init__(
        self, shape: DeltaState, dtype: torch.dtype, num_seqs: int = 2, length: int = 40, seed: int = 0
    ) -> None:
        self.shape = shape
        self.widths = (
            2 * shape.key_heads * shape.key_size + shape.value_heads * shape.value_size,
            shape.value_heads * (shape.key_size if shape.gate_by_key else 1),
            shape.value_heads,
        )
        super().__init__(num_seqs, length, sum(self.widths), dtype, seed)
        self.state = LayerState(ConvState(self.widths[0], 4), shape)
        self.decay = -torch.exp(self.random(shape.value_heads))
        self.dt_bias = self.random(self.widths[1])

    def run(self, kernels: StateOperations, x: Tensor, memory: StateMemory, plan: StatePlan) -> Tensor:
        qkv, gates, beta = x.split(self.widths, 1)
        return kernels.gated_delta(qkv, gates, beta, self.decay, self.dt_bias, self.shape, memory, plan)


class MambaLayer(Layer):
    """The recurrence of Mamba-2."""

    def __init__(
        self,
        shape: MambaState,
        dtype: torch.dtype,
        limits: tuple[float, float] = (0.0, math.inf),
        num_seqs: int = 2,
        length: int = 40,
        seed: int = 0,
    ) -> None:
        self.shape, self.limits = shape, limits
        self.widths = shape.heads * shape.head_size + 2 * shape.groups * shape.state_size, shape.heads
        super().__init__(num_seqs, length, sum(self.widths), dtype, seed)
        self.state = LayerState(ConvState(self.widths[0], 4), shape)
        self.decay = -torch.exp(self.random(shape.heads))
        self.dt_bias, self.d = self.random(shape.heads), self.random(shape.heads)

    def run(self, kernels: StateOperations, x: Tensor, memory: StateMemory, plan: StatePlan) -> Tensor:
        xbc, dt = x.split(self.widths, 1)
        return kernels.mamba(xbc, dt, self.decay, self.dt_bias, self.d, self.limits, self.shape, memory, plan)


@dataclass
class Running:
    """A sequence and its state."""

    table: list[int]
    context: int = 0
    folded: int = 0
    saves: dict[int, list[int]] = field(default_factory=dict)
    """Pages by position, of armed saves."""
    saved: dict[int, list[int]] = field(default_factory=dict)
    """Of those written."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a sequence does in a step: rows computed, of which the first are kept."""

    sequence: int
    rows: int
    kept: int


class Play:
    """Runs steps over sequences of a layer; outputs of kept rows are by sequence and position."""

    def __init__(
        self,
        kernels: StateOperations,
        layer: Layer,
        tail: int,
        saves: Sequence[tuple[int, int]] = (),
        num_states: int | None = None,
        seed: int = 0,
    ) -> None:
        """saves: pairs of sequence and position."""
        num_seqs = len(layer.inputs)
        self.kernels, self.layer, self.tail = kernels, layer, tail
        self.pages = StatePages(layer.state, tail, layer.dtype, 2 * num_seqs + len(saves), seed)
        self.running = [Running(self.pages.new_table()) for _ in range(num_seqs)]
        for sequence, position in saves:
            self.running[sequence].saves[position] = self.pages.new_table()
        longest = num_seqs * layer.inputs.shape[1]
        self.plan = kernels.new_state_plan(self.pages.pages_per_state, tail, longest, num_seqs)
        self.outputs: list[dict[int, Tensor]] = [{} for _ in range(num_seqs)]

    def step(self, pieces: Sequence[Piece]) -> None:
        """Run a step; what was written is read again only as far as it was kept."""
        rows = []
        for piece in pieces:
            inputs, start = self.layer.inputs[piece.sequence], self.running[piece.sequence].context
            rows += [inputs[start : start + piece.kept], self.layer.noise(piece.rows - piece.kept)]
        sequences = [self.running[piece.sequence] for piece in pieces]
        starts = torch.tensor([0, *(piece.rows for piece in pieces)]).cumsum(0).int()
        after = self._fill(sequences, starts)
        x = torch.cat(rows)
        out = self.layer.run(self.kernels, x, self.pages.memory, self.plan)
        for piece, each, first, folded in zip(pieces, sequences, starts.tolist(), after, strict=False):
            for row in range(piece.kept):
                self.outputs[piece.sequence][each.context + row] = out[first + row].clone()
            each.context, each.folded = each.context + piece.kept, folded

    def _fill(self, sequences: Sequence[Running], starts: Tensor) -> list[int]:
        """Set the plan; return where matrices stand after the step."""
        contexts, folded = (
            torch.tensor([getattr(each, name) for each in sequences], dtype=torch.int32)
            for name in ("context", "folded")
        )
        after = folded_after(starts, contexts, folded, self.tail)
        save_starts, positions, tables = [0], list[int](), list[list[int]]()
        for each, (first, last) in zip(sequences, zip(folded.tolist(), after.tolist(), strict=True), strict=True):
            now = [position for position in sorted(each.saves) if first <= position <= last]
            positions += now
            tables += [each.saves[position] for position in now]
            each.saved |= {position: each.saves.pop(position) for position in now}
            save_starts.append(len(positions))
        pages = self.pages.pages_per_state
        ints = [starts, contexts, folded, torch.tensor([each.table for each in sequences])]
        ints += [torch.tensor(save_starts), torch.tensor(positions), torch.tensor(tables).reshape(-1, pages)]
        self.plan.fill(*(each.int() for each in ints))
        found: list[int] = after.tolist()
        return found

    def load(self, sequence: int, position: int) -> None:
        """Continue a sequence from a save, in other pages."""
        each = self.running[sequence]
        table = self.pages.new_table()
        self.pages.copy(each.saved[position], table)
        self.running[sequence] = Running(table, position, position)
        self.outputs[sequence] = {}

    def result(self, sequence: int) -> Tensor:
        """Return the outputs of a sequence from its first computed position on."""
        found = self.outputs[sequence]
        return torch.stack([found[position] for position in sorted(found)])


def whole(kernels: StateOperations, layer: Layer, tail: int = 1) -> Tensor:
    """Return the outputs [sequences, length, columns] of one step for all tokens."""
    play = Play(kernels, layer, tail)
    length = layer.inputs.shape[1]
    play.step([Piece(index, length, length) for index in range(len(layer.inputs))])
    return torch.stack([play.result(index) for index in range(len(layer.inputs))])


def play_cut(play: Play, seed: int, most: int = 9) -> None:
    """Run all sequences to the end in steps cut at random, with rows that are rejected or computed again."""
    chance, length = random.Random(seed), play.layer.inputs.shape[1]
    while any(each.context < length for each in play.running):
        pieces = []
        for index, each in enumerate(play.running):
            left = length - each.context
            if not left or chance.random() < 0.2:
                continue
            kept = min(left, chance.choice((1, 1, 2, chance.randint(1, most))))
            again = chance.randint(0, play.tail)  # rows that are there for nothing
            kept = kept if chance.random() < 0.9 or kept + again > play.tail else 0
            pieces.append(Piece(index, kept + again or 1, kept))
        chance.shuffle(pieces)
        if pieces:
            play.step(pieces)
