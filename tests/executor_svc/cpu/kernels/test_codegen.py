"""What kernels are written with: arithmetic as IEEE 754 has it, loads and stores that keep to their memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_svc.cpu.kernels.codegen.compiled import Code, symbol
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec, pieces
from executor_svc.cpu.kernels.codegen.team import KernelLaunch, LaunchProgram, Team
from tests.executor_svc.cpu.kernels.emitted import mapped, run

DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- arithmetic


def two(function: Callable[[Vec, Vec], Vec]) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of two vectors for tensors [items, LANES] of floats."""

    def apply(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)

        def body(emit: Emitter, item: Int, _: Int, __: Int, left: Int, right: Int, into: Int) -> None:
            at = item * (4 * LANES)
            emit.store(
                function(emit.load(left + at, "float32"), emit.load(right + at, "float32")), into + at, "float32"
            )

        run(3, body, x.shape[0], x.data_ptr(), y.data_ptr(), out.data_ptr())
        return out

    return apply


def test_nothing_is_fused_or_reordered_unasked() -> None:
    """A sum that follows a product rounds twice, so does a chain that could be a sum of other pairs."""
    x, y = randn(0, 50, LANES), randn(1, 50, LANES)
    twice = (x * y) + y
    once = (x.double() * y.double() + y.double()).float()
    assert not torch.equal(twice, once)
    assert torch.equal(two(lambda a, b: a * b + b)(x, y), twice)
    assert torch.equal(two(lambda a, b: a.times_plus(b, b))(x, y), once)
    assert torch.equal(two(lambda a, b: ((a + b) - a) - b)(x, y), ((x + y) - x) - y)
    assert torch.equal(two(lambda a, b: (a / 3.0) / b)(x, y), (x / 3.0) / y)
    assert torch.equal(
        two(lambda a, b: (a * a + b * b).sqrt())(x, y), torch.from_numpy(np.sqrt((x * x + y * y).numpy()))
    )


def test_numbers_that_are_none() -> None:
    """Rounding keeps them; of two numbers the larger passes a NaN of the left over."""
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([nan, 1.0, -inf, inf, 0.0, -3.0, -inf, 3.0] * 2)[None]
    y = torch.tensor([1.0, nan, 2.0, 1.0, -0.5, -2.0, -inf, 5.0] * 2)[None]
    found = two(lambda a, b: a.larger(b))(x, y)[0, :8]
    assert found[[0, 2, 3, 4, 5, 6, 7]].tolist() == [1.0, 2.0, inf, 0.0, -2.0, -inf, 5.0]
    assert bool(found[1].isnan())
    assert bool(two(lambda a, b: a.rounded("bfloat16"))(x, y)[0, ::8].isnan().all())


def test_the_sum_of_lanes_has_one_order() -> None:
    """Halves, quarters and so on: the same in every lane, and the one that numpy gets in this order."""
    x = randn(2, 20, LANES) * 1000
    expected = x
    while expected.shape[1] > 1:
        half = expected.shape[1] // 2
        expected = expected[:, :half] + expected[:, half:]
    assert torch.equal(mapped(lambda v: v.total())(x), expected.expand(-1, LANES))
    assert torch.equal(mapped(lambda v: v.highest())(x), x.amax(1, keepdim=True).expand(-1, LANES))


def test_rounding_to_bfloat16() -> None:
    """Every bfloat16, what lies just about the middle to the next, and overflow."""
    exact = torch.arange(1 << 16, dtype=torch.int32) << 16
    middle = exact + (1 << 15)
    bits = torch.cat([exact, middle - 1, middle, middle + 1])
    x = bits.view(torch.float32)
    found, expected = mapped(lambda v: v.rounded("bfloat16"))(x), x.bfloat16().float()
    assert torch.equal(found.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(found.view(torch.int32)[kept], expected.view(torch.int32)[kept])


# --- memory


def copy(dtype: Dtype, count: int, known: bool) -> Callable[[Emitter, Int, Int, Int, Int, Int], None]:
    """A kernel that copies `count` numbers, a number that is known when it is compiled, or not."""

    def body(emit: Emitter, item: Int, _: Int, items: Int, source: Int, into: Int) -> None:
        if known:
            emit.store(emit.load(source, dtype, count), into, dtype, count)
        else:
            number = items * count  # one item
            emit.store_some(emit.load_some(source, dtype, number), into, dtype, number)

    return body


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("known", [True, False])
def test_parts_of_vectors_keep_to_their_memory(dtype: Dtype, known: bool) -> None:
    for count in range(1, LANES + 1):
        source = randn(count, 3 * LANES).to(DTYPES[dtype])
        out = torch.full_like(source, 7.0)
        at = (LANES + 1) * ITEM_BYTES[dtype]  # on no border of a vector
        run(2, copy(dtype, count, known), 1, source.data_ptr() + at, out.data_ptr() + at)
        assert torch.equal(out[LANES + 1 :][:count], source[LANES + 1 :][:count])
        assert bool((out[: LANES + 1] == 7).all() and (out[LANES + 1 + count :] == 7).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_lanes_beyond_a_part_are_zero_even_next_to_nan(dtype: Dtype) -> None:
    for count in (1, 5, 15):
        source = torch.full((2 * LANES,), float("nan")).to(DTYPES[dtype])
        source[:count] = 2.0
        out = torch.empty(LANES)

        def body(emit: Emitter, item: Int, _: Int, items: Int, x: Int, into: Int, count: int = count) -> None:
            emit.store(emit.load(x, dtype, count), into, "float32")

        run(2, body, 1, source.data_ptr(), out.data_ptr())
        assert out.tolist() == [2.0] * count + [0.0] * (LANES - count)


def test_one_number_in_every_lane_and_lanes_apart() -> None:
    for dtype, torch_dtype in DTYPES.items():
        source = randn(3, 20).to(torch_dtype)
        out = torch.zeros(LANES, 3, dtype=torch_dtype)
        size = ITEM_BYTES[dtype]

        def body(
            emit: Emitter, item: Int, _: Int, __: Int, x: Int, into: Int, dtype: Dtype = dtype, size: int = size
        ) -> None:
            emit.scatter(emit.load(x, dtype), into, 3 * size, dtype)
            emit.scatter(emit.load_all(x + 17 * size, dtype), into + size, 3 * size, dtype)

        run(2, body, 1, source.data_ptr(), out.data_ptr())
        assert torch.equal(out[:, 0], source[:LANES])
        assert bool((out[:, 1] == source[17]).all())
        assert not out[:, 2].any()


# --- control


@pytest.mark.parametrize(("start", "stop", "step"), [(0, 0, 1), (0, 7, 1), (3, 20, 4), (5, 2, 1), (-3, 4, 2)])
def test_loops_are_ranges(start: int, stop: int, step: int) -> None:
    seen = np.full(32, -1, np.int64)
    out = torch.zeros(LANES)

    def body(emit: Emitter, item: Int, _: Int, __: Int, into: Int, total: Int) -> None:
        def one(index: Int, sums: list[Vec]) -> list[Vec]:
            emit.builder.store(index.value, emit.pointer(into + (index + 8) * 8, index.value.type))
            return [sums[0] + 1.0]

        (count,) = emit.loop(start, stop, step, one, [emit.vec(0.0)])
        emit.store(count, total, "float32")

    run(2, body, 1, seen.ctypes.data, out.data_ptr())
    expected = list(range(start, stop, step))
    assert sorted(seen[seen != -1].tolist() + ([-1] if -1 in expected else [])) == sorted(expected)
    assert out.tolist() == [len(expected)] * LANES


def test_integers_and_conditions() -> None:
    out = np.zeros(8, np.int64)

    def body(emit: Emitter, item: Int, _: Int, items: Int, into: Int) -> None:
        number = items + 16  # one item: 17
        made = [number // 5, number % 5, number.least(3), number.most(3), emit.integer(-2).least(number), number - 20]
        for index, value in enumerate(made):
            emit.builder.store(value.value, emit.pointer(into + 8 * index, value.value.type))
        for index, condition in ((6, number.less(17)), (7, number.equals(17))):
            one = emit.integer(1).value
            emit.when(
                condition,
                lambda index=index, one=one: emit.builder.store(one, emit.pointer(into + 8 * index, one.type)),
            )

    run(1, body, 1, out.ctypes.data)
    assert out.tolist() == [3, 2, 3, 17, -2, -3, 0, 1]


def test_pieces_cover_a_length() -> None:
    for length in range(70):
        assert [at for start, count in pieces(length) for at in range(start, start + count)] == list(range(length))
        assert all(count == LANES for _, count in pieces(length)[:-1])


# --- compilation


def test_code_compiles_what_was_added_when_it_is_needed() -> None:
    """Late kernels join early ones; what was there is not made again, so addresses stay."""
    code, made = Code(), []

    def add(name: str) -> str:
        return code.kernel(name, 1, lambda *_: made.append(name))

    add("first")
    add("second")
    before = code.address("first"), code.address("second")
    add("third")
    add("first")
    assert code.address("third") not in before
    assert (code.address("first"), code.address("second")) == before
    assert made == ["first", "second", "third"]


def test_helpers_are_made_once_and_called() -> None:
    code, made, out = Code(), [], np.zeros(2, np.int64)

    def twice(emit: Emitter, value: Int, into: Int) -> None:
        made.append("twice")
        emit.builder.store((value + value).value, emit.pointer(into, value.value.type))

    def body(emit: Emitter, item: Int, _: Int, __: Int, into: Int) -> None:
        for at in range(2):
            code.helper("twice", 2, twice)(emit, emit.integer(20 + at), into + 8 * at)

    name = code.kernel("calls", 2, body)
    LaunchProgram(Team(code, 1), [KernelLaunch(name, "items", 1, 1, (out.ctypes.data,))]).run(items=1)
    assert out.tolist() == [40, 42]
    assert made == ["twice"]


def test_symbols_that_are_not_there() -> None:
    assert symbol(None, "malloc")
    assert symbol(None, "no_such_function_anywhere") is None
    assert symbol("libnosuchlibrary.so.9", "malloc") is None
