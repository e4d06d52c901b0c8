"""Reference implementation of the operations on recurrent states, in PyTorch: token by token, in fp32.

Each number comes from operations on tensors whose shapes do not depend on the step, so that its bits do not either: how
tokens are cut into steps, drafts, saves and loads do not show. Tests compare every device's kernels with it, and give
it to models where a device's kernels are not what is tested.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.device.states import GatedNormKind, StateMemory
from executor_svc.device.states import StatePlan as AnyStatePlan
from executor_svc.plan.state_sizes import ConvState, DeltaState, MambaState, Recurrence

_L2_EPS = 1e-6
_names = itertools.count()


@dataclass(frozen=True, slots=True)
class StateStep:
    """What a sequence does in a step."""

    rows: range
    """Its rows in the step."""
    context: int
    """Position of the first."""
    folded: int
    table: list[int]
    saves: tuple[tuple[int, list[int]], ...]
    """Positions and the pages that get the state as it stands there."""

    def folding(self, tail: int) -> int:
        """Return how many of its rows are folded in this step."""
        return max(0, len(self.rows) - tail)


class ReferenceStatePlan:
    """Implements `device.states.StatePlan`."""

    def __init__(self, pages_per_state: int, tail: int) -> None:
        self.name = f"states{next(_names)}"
        self.num_tiles = 0
        self.tail = tail
        self.steps: list[StateStep] = []
        self._pages = pages_per_state

    def fill(
        self,
        query_start_loc: Tensor,
        context_lens: Tensor,
        folded: Tensor,
        state_tables: Tensor,
        save_starts: Tensor,
        save_positions: Tensor,
        save_tables: Tensor,
    ) -> None:
        assert state_tables.shape[1] == save_tables.shape[1] == self._pages, "another number of pages"
        starts, saves = query_start_loc.tolist(), save_starts.tolist()
        positions, pages = save_positions.tolist(), save_tables.tolist()
        self.steps = [
            StateStep(
                range(starts[s], starts[s + 1]),
                context,
                int(folded[s]),
                state_tables[s].tolist(),
                tuple(zip(positions[saves[s] : saves[s + 1]], pages[saves[s] : saves[s + 1]], strict=True)),
            )
            for s, context in enumerate(context_lens.tolist())
            if starts[s + 1] > starts[s]
        ]
        self.num_tiles = len(self.steps)


@dataclass(frozen=True, slots=True)
class _Terms:
    """What a row does to the matrices of H heads, and what it reads."""

    key: Tensor
    """[H, rows]"""
    query: Tensor
    """[H, rows]"""
    decay: Tensor
    """[H, decays]"""
    value: Tensor
    """[H, columns]"""
    beta: Tensor | None
    """[H, 1] of the delta rule; None: the value is added as it is."""


@dataclass(frozen=True, slots=True)
class _Folding:
    """A row of the tail, of H heads."""

    key: Tensor
    decay: Tensor
    added: Tensor
    """[H, columns]"""

    def into(self, matrices: Tensor) -> Tensor:
        """Return matrices [H, rows, columns] with the row folded in."""
        return matrices * self.decay[..., None] + self.key[..., None] * self.added[:, None]


class _Heads:
    """The units of a layer's heads in the pages of one state."""

    def __init__(self, recurrence: Recurrence, memory: StateMemory, table: list[int], tail: int) -> None:
        self._unit, self._tail = recurrence.unit, tail
        places = zip(memory.pages[1:], memory.offsets[1:], strict=True)
        size = self._unit.num_parts * self._unit.part_floats(tail) * 4
        self._parts = [
            memory.pool[table[page], offset : offset + size]
            .view(torch.float32)
            .unflatten(0, (self._unit.num_parts, -1))
            for page, offset in places
        ]
        """Of each head, [parts, floats of a part]."""

    def read(self) -> Tensor:
        """Return the matrices [H, rows, columns]."""
        matrices = [self._matrix(parts).permute(1, 0, 2).flatten(1)[:, : self._unit.columns] for parts in self._parts]
        return torch.stack(matrices)

    def write(self, matrices: Tensor) -> None:
        for parts, matrix in zip(self._parts, matrices, strict=True):
            self._matrix(parts).copy_(self._split(matrix).permute(1, 0, 2))

    def read_tail(self, position: int) -> _Folding:
        unit, rows = self._unit, [self._tail_rows(parts, position) for parts in self._parts]
        sizes = unit.padded_rows, unit.decay_columns, unit.part_columns
        keys, decays, added = torch.stack(rows).split(sizes, -1)
        return _Folding(
            keys[:, 0, : unit.rows], decays[:, 0, : unit.decays], added.flatten(1)[:, : unit.columns]
        )  # fmt: skip

    def write_tail(self, position: int, row: _Folding) -> None:
        unit = self._unit
        key = functional.pad(row.key, (0, unit.padded_rows - unit.rows))
        decay = functional.pad(row.decay, (0, unit.decay_columns - unit.decays))
        shared = torch.cat([key, decay], -1)[:, None].expand(-1, unit.num_parts, -1)
        whole = torch.cat([shared, self._split(row.added)], -1)
        for parts, numbers in zip(self._parts, whole, strict=True):
            self._tail_rows(parts, position).copy_(numbers)

    def _split(self, numbers: Tensor) -> Tensor:
        """Return numbers [..., columns] as [..., parts, part_columns], with zeros behind the last."""
        unit = self._unit
        missing = unit.num_parts * unit.part_columns - unit.columns
        split: Tensor = functional.pad(numbers, (0, missing)).unflatten(-1, (unit.num_parts, unit.part_columns))
        return split

    def _matrix(self, parts: Tensor) -> Tensor:
        """Return a view [parts, rows, part_columns]."""
        unit = self._unit
        matrix: Tensor = parts[:, : unit.rows * unit.part_columns].unflatten(1, (unit.rows, unit.part_columns))
        return matrix

    def _tail_rows(self, parts: Tensor, position: int) -> Tensor:
        """Return a view [parts, tail_columns]."""
        unit = self._unit
        rows: Tensor = parts[:, unit.rows * unit.part_columns :].unflatten(1, (self._tail, unit.tail_columns))
        return rows[:, position % self._tail]


class ReferenceStates:
    """Implements `device.states.StateOperations`; its operations cannot be recorded.

    Tests give them to a device's kernels as a base class before that of the kernels.
    """

    def new_state_plan(self, pages_per_state: int, tail: int, max_tokens: int, max_seqs: int) -> ReferenceStatePlan:
        return ReferenceStatePlan(pages_per_state, tail)

    def causal_conv(
        self,
        x: Tensor,
        from_column: int,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
        memory: StateMemory,
        plan: AnyStatePlan,
    ) -> Tensor:
        assert isinstance(plan, ReferenceStatePlan)
        state = ConvState(weight.shape[1], weight.shape[0])
        columns = x[:, from_column : from_column + state.channels]
        out = torch.zeros_like(columns)
        for step in plan.steps:
            inputs = _inputs(columns, state, memory, step, plan.tail)
            for index, row in enumerate(step.rows):
                out[row] = _convolved(inputs[index : index + state.width], weight, bias, silu)
            _write_ring(inputs, state, memory, step, plan.tail)
        return out

    def gated_delta(
        self,
        qkv: Tensor,
        gates: Tensor,
        beta: Tensor,
        decay: Tensor,
        dt_bias: Tensor,
        shape: DeltaState,
        memory: StateMemory,
        plan: AnyStatePlan,
    ) -> Tensor:
        def terms(row: int) -> _Terms:
            return _delta_terms(qkv[row], gates[row], beta[row], decay, dt_bias, shape)

        return _recurrence(qkv, terms, shape, memory, plan, None)

    def mamba(
        self,
        xbc: Tensor,
        dt: Tensor,
        decay: Tensor,
        dt_bias: Tensor,
        d: Tensor,
        limits: tuple[float, float],
        shape: MambaState,
        memory: StateMemory,
        plan: AnyStatePlan,
    ) -> Tensor:
        def terms(row: int) -> _Terms:
            return _mamba_terms(xbc[row], dt[row], decay, dt_bias, limits, shape)

        def skip(row: int) -> Tensor:
            values = xbc[row, : shape.heads * shape.head_size].float().view(shape.heads, -1)
            return d[:, None] * values

        return _recurrence(xbc, terms, shape, memory, plan, skip)

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        from_column: int,
        weight: Tensor,
        eps: float,
        group: int,
        kind: GatedNormKind,
    ) -> Tensor:
        gates = gate[:, from_column : from_column + x.shape[1]]
        weights = weight.repeat(x.shape[1] // len(weight))
        rows = (_gated_norm(row, own, weights, eps, group, kind) for row, own in zip(x, gates, strict=True))
        return torch.stack([*rows]) if len(x) else torch.empty_like(x)

    def multiply(self, x: Tensor, factors: Tensor, from_column: int) -> Tensor:
        return x * factors[:, from_column : from_column + x.shape[1]]


# ---------------------------------------------------------------------- the recurrence


def _recurrence(
    x: Tensor,
    terms: Callable[[int], _Terms],
    shape: Recurrence,
    memory: StateMemory,
    plan: AnyStatePlan,
    skip: Callable[[int], Tensor] | None,
) -> Tensor:
    """Return outputs [T, H * columns] in the dtype of x; skip: returns what is added to a row's outputs."""
    assert isinstance(plan, ReferenceStatePlan)
    out = torch.zeros(len(x), shape.num_heads * shape.unit.columns, dtype=x.dtype)
    for step in plan.steps:
        heads = _Heads(shape, memory, step.table, plan.tail)
        saves = {position: _Heads(shape, memory, pages, plan.tail) for position, pages in step.saves}
        start = torch.zeros_like(heads.read()) if step.folded == 0 else heads.read()
        matrices = start
        for position, matrices in _folded_rows(start, heads, step):
            if position in saves:
                saves[position].write(matrices)
        last = step.context + step.folding(plan.tail)
        heads.write(matrices)
        for position, row in enumerate(step.rows, step.context):
            found, matrices, folding = _one_token(matrices, terms(row))
            out[row] = (found if skip is None else found + skip(row)).flatten().to(x.dtype)
            if position >= last:
                heads.write_tail(position, folding)
                continue
            heads.write(matrices)
            if position + 1 in saves:
                saves[position + 1].write(matrices)
    return out


def _folded_rows(matrices: Tensor, heads: _Heads, step: StateStep) -> Iterator[tuple[int, Tensor]]:
    """Yield the matrices at positions folded to context, and these."""
    yield step.folded, matrices
    for position in range(step.folded, step.context):
        matrices = heads.read_tail(position).into(matrices)
        yield position + 1, matrices


def _one_token(matrices: Tensor, terms: _Terms) -> tuple[Tensor, Tensor, _Folding]:
    """Return a token's outputs [H, columns], the matrices after it, and its row of the tail."""
    added = terms.value
    if terms.beta is not None:
        known = (matrices * terms.decay[..., None] * terms.key[..., None]).sum(1)
        added = terms.beta * (terms.value - known)
    folding = _Folding(terms.key, terms.decay, added)
    after = folding.into(matrices)
    return (after * terms.query[..., None]).sum(1), after, folding


def _delta_terms(qkv: Tensor, gates: Tensor, beta: Tensor, decay: Tensor, dt_bias: Tensor, shape: DeltaState) -> _Terms:
    sizes = [shape.key_heads * shape.key_size] * 2 + [shape.value_heads * shape.value_size]
    q, k, v = qkv.float().split(sizes)
    owners = [shape.key_head(head) for head in range(shape.value_heads)]
    q, k = (_unit_length(each.view(shape.key_heads, -1))[owners] for each in (q, k))
    steps = functional.softplus(gates.float() + dt_bias).view(shape.value_heads, -1)
    decays = torch.exp(decay[:, None] * steps)
    strength = torch.sigmoid(beta.float()).to(beta.dtype).float()[:, None]
    return _Terms(k, q * shape.key_size**-0.5, decays, v.view(shape.value_heads, -1), strength)


def _mamba_terms(
    xbc: Tensor, dt: Tensor, decay: Tensor, dt_bias: Tensor, limits: tuple[float, float], shape: MambaState
) -> _Terms:
    width = shape.groups * shape.state_size
    x, b, c = xbc.float().split([shape.heads * shape.head_size, width, width])
    owners = [shape.key_head(head) for head in range(shape.heads)]
    b, c = (each.view(shape.groups, -1)[owners] for each in (b, c))
    steps = functional.softplus(dt.float() + dt_bias).clamp(*limits)[:, None]
    return _Terms(b, c, torch.exp(steps * decay[:, None]), steps * x.view(shape.heads, -1), None)


def _unit_length(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


# ---------------------------------------------------------------------- convolutions


def _ring(state: ConvState, memory: StateMemory, table: list[int], tail: int, dtype: torch.dtype) -> Tensor:
    """Return a view [rows of the ring, C] of a unit."""
    rows = state.ring_rows(tail)
    size = rows * state.channels * dtype.itemsize
    numbers = memory.pool[table[memory.pages[0]], memory.offsets[0] : memory.offsets[0] + size]
    return numbers.view(dtype).view(rows, state.channels)


def _inputs(columns: Tensor, state: ConvState, memory: StateMemory, step: StateStep, tail: int) -> Tensor:
    """Return the rows of a sequence from position context - width + 1 on, those before position 0 as zeros."""
    ring = _ring(state, memory, step.table, tail, columns.dtype)
    before = [
        ring[position % len(ring)] if position >= 0 else torch.zeros_like(ring[0])
        for position in range(step.context - state.width + 1, step.context)
    ]
    return torch.stack([*before, *columns[step.rows.start : step.rows.stop]])


def _convolved(inputs: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Return a row [C] for inputs [W, C]."""
    total = torch.zeros(weight.shape[1])
    for taps, row in zip(weight.float(), inputs.float(), strict=True):
        total = total + taps * row
    if bias is not None:
        total = total + bias.float()
    rounded = total.to(inputs.dtype)
    return functional.silu(rounded.float()).to(inputs.dtype) if silu else rounded


def _write_ring(inputs: Tensor, state: ConvState, memory: StateMemory, step: StateStep, tail: int) -> None:
    """Write saves, then the step's last rows; inputs: of `_inputs`."""
    ring = _ring(state, memory, step.table, tail, inputs.dtype)
    first = step.context - state.width + 1
    for position, pages in step.saves:
        saved = _ring(state, memory, pages, tail, inputs.dtype)
        for each in range(max(0, position - state.width + 1), position):
            saved[each % len(ring)] = inputs[each - first] if each >= first else ring[each % len(ring)]
    end = step.context + len(step.rows)
    for each in range(max(step.context, end - len(ring)), end):
        ring[each % len(ring)] = inputs[each - first]


# ---------------------------------------------------------------------- gated norms


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, kind: GatedNormKind) -> Tensor:
    """Return a row [width]."""
    activate = torch.sigmoid if kind == "norm then sigmoid" else functional.silu
    activated, numbers = activate(gate.float()), x.float()
    between = torch.float32 if weight.dtype != x.dtype else x.dtype
    if kind == "silu then norm":
        numbers = numbers * activated
    groups = numbers.view(-1, group)
    normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten()
    scaled = (normed.to(between).float() * weight.float()).to(between)
    return (scaled.float() if kind == "silu then norm" else scaled.float() * activated).to(x.dtype)
