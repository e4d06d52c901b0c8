"""Recurrent layers: decodes by the bytes of their states beside the bandwidth, prompts by their time a token.

Before anything is timed, two sequences are computed in one step, and in steps cut elsewhere with a saved state between
them: the results must be near those of the reference, and the same bits as each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.gpu.cases import Bench, Case, Goal, Group, Metrics
from benchmarks.gpu.kernels.attention.attention import bandwidth
from benchmarks.gpu.kernels.attention.attention_launch import arch_and_sms

if TYPE_CHECKING:
    from executor_svc.device.states import StateMemory, StateOperations
    from executor_svc.gpu.states import GpuStateKernels
    from executor_svc.plan.state_sizes import LayerState

_GOAL = Goal("percent_of_copy", at_least=60)
_DECODES, _PROMPTS = (1, 16, 64, 256), (256, 2048)
_CHECKED = 24
"""Tokens of a sequence in the comparison with the reference."""


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """A layer's sizes: those of the delta rule (key heads, value heads, key size, value size), of Mamba-2 (heads, head
    size, state size, groups), or of a convolution alone (channels, taps)."""

    name: str
    kind: str
    sizes: tuple[int, ...]

    def state(self) -> LayerState:
        """Return what it keeps of a sequence."""
        from executor_svc.plan.state_sizes import ConvState, DeltaState, LayerState, MambaState

        if self.kind == "conv":
            return LayerState(ConvState(self.sizes[0], self.sizes[1]))
        if self.kind == "mamba":
            heads, size, state, groups = self.sizes
            return LayerState(ConvState(heads * size + 2 * groups * state, 4), MambaState(heads, size, state, groups))
        key_heads, value_heads, key, value = self.sizes
        shape = DeltaState(key_heads, value_heads, key, value, gate_by_key=self.kind == "delta by key")
        return LayerState(ConvState(2 * key_heads * key + value_heads * value, 4), shape)


QWEN = RecurrentLayer("Qwen3.5-4B", "delta", (16, 32, 128, 128))
KIMI = RecurrentLayer("Kimi Linear", "delta by key", (32, 32, 128, 128))
GRANITE = RecurrentLayer("Granite 4.0 H-small", "mamba", (128, 64, 128, 1))
FALCON = RecurrentLayer("Falcon-H1 with states of 256", "mamba", (24, 64, 256, 1))
LFM = RecurrentLayer("LFM2", "conv", (2048, 3))
TINY = [
    RecurrentLayer("tiny", "delta", (1, 2, 8, 16)),
    RecurrentLayer("tiny by key", "delta by key", (2, 2, 8, 16)),
    RecurrentLayer("tiny mamba", "mamba", (2, 16, 16, 1)),
    RecurrentLayer("tiny conv", "conv", (16, 3)),
]


def cases(tiny: bool) -> Sequence[Case]:
    """Decodes, then prompts of one sequence and of 16, then decodes with places for three drafts."""
    if tiny:
        return [_case(layer, 2, rows, tail) for layer in TINY for rows, tail in ((1, 1), (6, 3))]
    layers = (QWEN, GRANITE, KIMI, LFM, FALCON)
    found = [_case(layer, batch, 1, 1) for layer in layers for batch in _DECODES]
    found += [_case(layer, batch, rows, 1) for layer in layers for batch in (1, 16) for rows in _PROMPTS]
    return found + [_case(layer, batch, 4, 4) for layer in layers for batch in (1, 64)]


def _case(layer: RecurrentLayer, batch: int, rows: int, tail: int) -> Case:
    params = {
        "kind": layer.kind, "sizes": ", ".join(map(str, layer.sizes)), "batch": batch, "rows": rows, "tail": tail,
    }  # fmt: skip
    name = f"{layer.name}, {batch} x {rows} tokens, tail {tail}"
    goal = _GOAL if rows <= tail and batch >= 64 and layer.kind != "conv" else None
    return Case(name, params, lambda bench: _time(bench, layer, batch, rows, tail), 6.0, goal)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a layer for T tokens, in bf16, and its parameters."""

    x: Tensor
    """[T, channels], of the convolution."""
    gates: Tensor
    strengths: Tensor
    weight: Tensor
    decay: Tensor
    dt_bias: Tensor
    d: Tensor

    @staticmethod
    def of(state: LayerState, num_tokens: int, device: torch.device, seed: int = 0) -> Inputs:
        """Return random ones."""
        from executor_svc.plan.state_sizes import DeltaState

        generator = torch.Generator().manual_seed(seed)

        def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype).to(device)

        shape = state.recurrence
        heads = 1 if shape is None else shape.num_heads
        gates = heads * shape.key_size if isinstance(shape, DeltaState) and shape.gate_by_key else heads
        wide = torch.float32
        return Inputs(
            x=random(num_tokens, state.conv.channels),
            gates=random(num_tokens, gates),
            strengths=random(num_tokens, heads),
            weight=random(state.conv.width, state.conv.channels),
            decay=-random(heads, dtype=wide).exp(),
            dt_bias=random(gates, dtype=wide) - 3,
            d=random(heads, dtype=wide),
        )

    def rows(self, start: int, end: int) -> Inputs:
        """Return those of some tokens."""
        x, gates, strengths = (each[start:end] for each in (self.x, self.gates, self.strengths))
        return replace(self, x=x, gates=gates, strengths=strengths)


class Sequences:
    """States of sequences of one layer in scattered pages of a pool that is full of NaN, and steps over them."""

    def __init__(
        self,
        operations: StateOperations,
        state: LayerState,
        batch: int,
        tail: int,
        most_tokens: int,
        device: torch.device,
        num_saves: int = 0,
    ) -> None:
        from executor_svc.device.states import StateMemory
        from executor_svc.plan.state_sizes import HEADER_BYTES

        self.operations, self.state, self.batch, self.tail = operations, state, batch, tail
        sizes = state.unit_bytes(tail, torch.bfloat16)
        page = max(sizes) + HEADER_BYTES
        pool = torch.full((len(sizes) * (batch + num_saves), page), 0xFF, dtype=torch.uint8, device=device)
        places = tuple(range(len(sizes)))
        self.memory: StateMemory = StateMemory(pool, places, (HEADER_BYTES,) * len(sizes))
        self.unit_bytes = sum(sizes)
        pages = torch.randperm(len(pool), generator=torch.Generator().manual_seed(1)).int()
        self.tables, self.save_tables = pages.view(-1, len(sizes)).split([batch, num_saves])
        self.plan = operations.new_state_plan(len(sizes), tail, most_tokens, batch)
        self.context = self.folded = 0

    def fill(self, rows: int, saves: Sequence[int] = ()) -> None:
        """Set a step of so many rows of each sequence; saves: positions of the first one's, in the pages for them."""

        def ints(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        starts = torch.arange(self.batch + 1, dtype=torch.int32) * rows
        context, folded = (ints(each).expand(self.batch) for each in (self.context, self.folded))
        save_starts = ints(0, *[len(saves)] * self.batch)
        saved = save_starts, ints(*saves), self.save_tables[: len(saves)]
        self.plan.fill(starts, context, folded, self.tables, *saved)

    def run(self, inputs: Inputs) -> Tensor:
        """Run the layer's convolution and recurrence over the step that was filled."""
        from executor_svc.plan.state_sizes import DeltaState, MambaState

        shape = self.state.recurrence
        where = self.memory, self.plan
        x = self.operations.causal_conv(inputs.x, 0, inputs.weight, None, True, *where)
        scalars = inputs.decay, inputs.dt_bias
        if isinstance(shape, DeltaState):
            return self.operations.gated_delta(x, inputs.gates, inputs.strengths, *scalars, shape, *where)
        if isinstance(shape, MambaState):
            limits = (0.0, float("inf"))
            return self.operations.mamba(x, inputs.gates, *scalars, inputs.d, limits, shape, *where)
        return x

    def step(self, inputs: Inputs, rows: int, saves: Sequence[int] = ()) -> Tensor:
        """Run the next `rows` tokens of each sequence."""
        self.fill(rows, saves)
        out = self.run(inputs)
        self.context, self.folded = self.context + rows, self.context + max(0, rows - self.tail)
        return out

    def load(self, position: int) -> None:
        """Let the first sequence go on from the first save, at this position."""
        self.memory.pool[self.tables[0].long()] = self.memory.pool[self.save_tables[0].long()]
        self.context = self.folded = position


def check(kernels: GpuStateKernels, state: LayerState, tail: int, device: torch.device) -> float:
    """Return the relative error of outputs in bf16 beside the reference; raises RuntimeError where they are wrong.

    The steps of the second computation are cut elsewhere, and the third goes on from a state saved inside a step.
    """
    from executor_svc.device.state_reference import ReferenceStates

    cpu, half = torch.device("cpu"), _CHECKED // 2
    inputs = Inputs.of(state, _CHECKED, device)
    reference = Sequences(ReferenceStates(), state, 1, tail, _CHECKED, cpu)
    expected = reference.step(Inputs.of(state, _CHECKED, cpu), _CHECKED).float()
    whole = Sequences(kernels, state, 1, tail, _CHECKED, device, 1)
    found = whole.step(inputs, _CHECKED, [half]).clone()
    cut = Sequences(kernels, state, 1, tail, _CHECKED, device)
    pieces, start = [], 0
    for rows in (1, 5, 1, 1, half - 8, half):
        pieces.append(cut.step(inputs.rows(start, start + rows), rows).clone())
        start += rows
    whole.load(half)
    rest = whole.step(inputs.rows(half, _CHECKED), _CHECKED - half)
    for name, other in (("cut elsewhere", torch.cat(pieces)), ("after a saved state", rest)):
        if not torch.equal(other, found[len(found) - len(other) :]):
            raise RuntimeError(f"steps {name} give other bits")
    error = float((found.float().cpu() - expected).norm() / expected.norm())
    if not error < 0.02:
        raise RuntimeError(f"a relative error of {error:.3g} beside the reference")
    return error


def _time(bench: Bench, layer: RecurrentLayer, batch: int, rows: int, tail: int) -> Metrics:
    """Check, then time a step behind a context: convolution and recurrence together, and the recurrence alone."""
    from executor_svc.gpu.states import GpuStateKernels

    state, tokens = layer.state(), batch * rows
    kernels = GpuStateKernels(bench.device, *arch_and_sms(bench.device))
    error = bench.cached(f"{layer.name} {tail}", lambda: check(kernels, state, tail, bench.device))
    if bench.device.type == "cuda":
        needed = batch * (sum(state.unit_bytes(tail, torch.bfloat16)) * 1.1)
        if needed > 0.9 * torch.cuda.mem_get_info(bench.device)[0]:
            raise RuntimeError(f"{needed / 2**30:.0f} GiB of states do not fit")
    sequences = Sequences(kernels, state, batch, tail, tokens, bench.device)
    inputs = Inputs.of(state, tokens, bench.device)
    while not sequences.folded:  # matrices at position 0 are not read
        sequences.step(inputs, rows)
    sequences.fill(rows)
    with kernels.recording() as recording:
        sequences.run(inputs)
        program = recording.program()
    seconds = bench.clock.seconds(lambda: program.run(rows=tokens))
    # A step reads and writes each state once.
    moved = 2 * batch * sequences.unit_bytes
    metrics = bandwidth(bench, moved, seconds) if rows <= tail else {"us": 1e6 * seconds}
    return {**metrics, "us_per_token": 1e6 * seconds / rows, "relative_error": error}


GROUP = Group("recurrences", "recurrent layers", cases, limit_s=150)
