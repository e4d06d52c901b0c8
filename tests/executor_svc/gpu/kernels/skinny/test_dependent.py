"""Kernels that may begin before the one before them ends, interpreted: what they do first, and the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_svc.gpu.kernels.dependent import LEAST_ARCH
from executor_svc.gpu.kernels.skinny.attention import NewKeys, attention_of_new
from executor_svc.gpu.kernels.skinny.product import RowNorm, skinny_product, square_rows
from executor_svc.gpu.kernels.skinny.tiles import GATED_NARROW, GATED_WIDE, NARROW, ROWS, WIDE, SkinnyPlan, SkinnyTile
from tests.executor_svc.gpu.kernels.attention.cases import ARCH, Sizes, make_call
from tests.executor_svc.gpu.kernels.attention.test_split import SMS, scratch_for
from tests.executor_svc.gpu.kernels.skinny.test_attention_of_new import random_rope, slots_of
from tests.executor_svc.gpu.kernels.skinny.test_skinny_product import Made, scratch_of

ON_GPU = torch.cuda.is_available()
interpreted = pytest.mark.skipif(ON_GPU, reason="needs the order of operations, which the interpreter alone records")

WAIT, LAUNCH, PREFETCH, MEMORY = "wait", "launch_dependents", "prefetch", "memory"


class Event(NamedTuple):
    """What a program of the last launch did."""

    program: tuple[int, ...]
    kind: str
    places: Any = None
    """Addresses of a prefetch."""


class Watched:
    """The interpreter's memory and assembly; notes what programs do, in order."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.events: list[Event] = []

    def note(self, kind: str, places: Any = None) -> None:
        from triton.runtime import interpreter

        self.events.append(Event(tuple(interpreter.interpreter_builder.grid_idx), kind, places))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._memory, name)
        if name not in ("load", "store", "atomic_rmw", "atomic_cas"):
            return found

        def noted(*args: Any) -> Any:
            self.note(MEMORY)
            return found(*args)

        return noted

    def kinds(self, program: tuple[int, ...]) -> list[str]:
        return [event.kind for event in self.events if event.program == program]

    def programs(self) -> set[tuple[int, ...]]:
        return {event.program for event in self.events}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    from triton.runtime import interpreter

    found = Watched(interpreter._interpreter)
    monkeypatch.setattr(interpreter, "_interpreter", found)
    assemble = interpreter.InterpreterBuilder.create_inline_asm

    def noted(self: Any, text: str, constraints: str, values: Any, *others: Any) -> Any:
        (kind,) = (each for each in (WAIT, LAUNCH, PREFETCH) if each in text)
        found.note(kind, *(value.data.copy() for value in values))
        return assemble(self, text, constraints, values, *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", noted)
    return found


def waits_first(watched: Watched, num_programs: int, num_prefetches: int) -> None:
    """Each program: before it reads, writes or ends, and then it lets the next kernel begin, once."""
    assert len(watched.programs()) == num_programs
    for program in watched.programs():
        kinds = watched.kinds(program)
        assert kinds[: num_prefetches + 2] == [*[PREFETCH] * num_prefetches, WAIT, LAUNCH]
        assert {*kinds[num_prefetches + 2 :]} <= {MEMORY}


def twice(run: Callable[[bool], Tensor], watched: Watched) -> None:
    """In order, without a word for other kernels; and early, with the same bits."""
    expected = run(False).clone()
    assert {event.kind for event in watched.events} == {MEMORY}
    watched.events.clear()
    assert torch.equal(run(True).view(torch.uint8), expected.view(torch.uint8))


@interpreted
@pytest.mark.parametrize(
    ("tile", "parts", "ending"),
    [
        (NARROW, 1, "plain"),
        (WIDE, 2, "plain"),
        (NARROW, 2, "residual"),
        (GATED_NARROW, 1, "silu"),
        (GATED_WIDE, 2, "silu"),
    ],
)
@pytest.mark.parametrize("columns", [272, 1552])
def test_products(tile: SkinnyTile, parts: int, ending: str, columns: int, watched: Watched) -> None:
    """And they ask for all of their weight's columns in the first steps, and for nothing else."""
    gated, features = ending == "silu", 100
    made = Made(3, features, columns, torch.device("cpu"), torch.bfloat16, times=1 + gated)
    steps = -(-columns // tile.inner)
    plan = SkinnyPlan(tile, -(-features // tile.features), parts, -(-steps // parts) * tile.inner)
    scratch, before = scratch_of(plan, gated, made.x.device), made.out.clone()
    squares = torch.zeros(plan.num_tiles, ROWS) if ending == "residual" else None
    norm = None if ending == "residual" else RowNorm(made.norm_weight, 1e-5, made.squares)

    def run(dependent: bool) -> Tensor:
        out = before.clone()
        activation = "silu" if gated else None
        skinny_product(
            made.x, made.weight, out, scratch, plan, norm, made.bias, activation, squares, dependent=dependent
        )  # fmt: skip
        return out if squares is None else torch.cat([out.float().view(-1), squares.view(-1)])

    watched.events.clear()
    twice(run, watched)
    waits_first(watched, plan.num_tiles * parts, (1 + gated) * (tile.num_stages - 1))
    ahead = (tile.num_stages - 1) * tile.inner
    wanted = torch.zeros(made.weight.shape, dtype=torch.bool)
    for begin in range(0, columns, plan.part):
        wanted[:, begin : min(begin + min(ahead, plan.part), columns)] = True
    assert torch.equal(asked_for(watched, made.weight), wanted)


def asked_for(watched: Watched, weight: Tensor) -> Tensor:
    """Which numbers of a weight are asked for by any program."""
    found = torch.zeros(weight.numel(), dtype=torch.bool)
    for place in np.unique(
        np.concatenate([event.places.ravel() for event in watched.events if event.kind == PREFETCH])
    ):
        first, odd = divmod(int(place) - weight.data_ptr(), weight.element_size())
        assert (odd, first % 16) == (0, 0)
        assert 0 <= first < weight.numel()
        found[first : first + 16] = True
    return found.view(weight.shape)


@interpreted
@pytest.mark.parametrize("many", [False, True])
def test_attention(many: bool, watched: Watched) -> None:
    """Programs without keys wait, too: only if all have waited has every kernel before ended when this one has."""
    sizes = Sizes(2, 4)
    call = make_call([(299, 1), (3, 2 if many else 1), (-1, 1)], sizes, torch.device("cpu"))
    width, heads = sizes.head_size, sizes.kv_heads * sizes.group
    qkv = torch.randn(len(call.q), (heads + 2 * sizes.kv_heads) * width).to(sizes.dtype)
    rope = random_rope(call, width, sizes.dtype, torch.Generator().manual_seed(1))
    slots, kv_layer = slots_of(call), call.kv_layer

    def run(dependent: bool) -> Tensor:
        called = replace(call, kv_layer=kv_layer, q=qkv.view(len(qkv), -1, width)[:, :heads], out=call.out.clone())
        new = NewKeys(qkv, rope, slots, None)
        attention_of_new(called, new, ARCH, scratch_for(called, SMS), SMS, dependent=dependent)
        return called.out

    twice(run, watched)
    idle = sum(watched.kinds(program).count(MEMORY) <= 4 for program in watched.programs())
    assert idle > 0, "programs of padding, and beyond the keys of short sequences"
    waits_first(watched, len(watched.programs()), 0)
    assert len(watched.programs()) % (call.num_seqs * sizes.kv_heads) == 0


@interpreted
def test_sums_of_squares_let_the_next_begin_and_are_in_order_themselves(watched: Watched) -> None:
    plan = SkinnyPlan.of(100, 272, False, SMS)
    x, squares = torch.randn(3, 100).to(torch.bfloat16), torch.zeros(plan.num_tiles, ROWS)

    def run(dependents: bool) -> Tensor:
        square_rows(x, squares, plan, dependents)
        return squares

    twice(run, watched)
    assert {tuple(watched.kinds(program)) for program in watched.programs()} == {(LAUNCH, MEMORY, MEMORY)}


@pytest.mark.skipif(ON_GPU and ARCH < LEAST_ARCH, reason="needs programmatic dependent launches")
def test_chains_have_the_same_bits(device: torch.device) -> None:
    """Products that read each other's results and share scratch memory, of two inputs in turn: none comes late."""
    made = Made(5, 256, 256, device, torch.bfloat16, times=2)
    square = made.weight[:256].contiguous()
    scale = RowNorm(made.norm_weight, 1e-5, torch.zeros(8, ROWS, device=device))
    plan, gated = SkinnyPlan(NARROW, 8, 2, 128), SkinnyPlan(GATED_NARROW, 8, 2, 128)
    scratch, middle, fed = scratch_of(gated, True, device), torch.empty_like(made.x), torch.empty_like(made.x)
    inputs = made.x, (made.x * 1.5).contiguous()

    def run(x: Tensor, early: bool) -> Tensor:
        residual = x.clone()
        square_rows(residual, scale.squares, plan, early)
        for _ in range(3):
            skinny_product(residual, square, middle, scratch, plan, scale, dependent=early)
            skinny_product(middle, square, residual, scratch, plan, squares=scale.squares, dependent=early)
            skinny_product(residual, made.weight, fed, scratch, gated, scale, None, "silu", dependent=early)
            skinny_product(fed, square, residual, scratch, plan, squares=scale.squares, dependent=early)
        return residual

    expected = [run(x, False) for x in inputs]
    assert not torch.equal(*expected)
    assert expected[0].isfinite().all()
    for _ in range(50 if ON_GPU else 1):
        assert all(torch.equal(run(x, True), wanted) for x, wanted in zip(inputs, expected, strict=True))
