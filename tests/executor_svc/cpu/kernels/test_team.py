"""Threads that take items one by one: each item once, launch after launch, whatever else the cores do."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from executor_svc.cpu.kernels.codegen import team as teams
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import Emitter, Int
from executor_svc.cpu.kernels.codegen.team import KernelLaunch, LaunchProgram, Team
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.linear import CpuLinear

THREADS = [1, 2, 3, 8]


def count_items(code: Code) -> str:
    """A kernel whose item adds 1 to its own number and notes its thread and the launch's count."""

    def body(emit: Emitter, item: Int, thread: Int, count: Int, into: Int) -> None:
        at = into + item * 24
        for offset, value in ((0, emit.load_int(at) + 1), (8, thread), (16, count)):
            emit.builder.store(value.value, emit.pointer(at + offset, value.value.type))

    return code.kernel("count_items", 2, body)


def new_counts(items: int) -> NDArray[np.int64]:
    return np.zeros((items, 3), np.int64)


@pytest.mark.parametrize("num_threads", THREADS)
def test_each_item_once(num_threads: int) -> None:
    code = Code()
    kernel, counts = count_items(code), new_counts(1000)
    team = Team(code, num_threads)
    assert team.num_threads == num_threads, "OpenMP's library is there"
    program = LaunchProgram(team, [KernelLaunch(kernel, "rows", 1, 1, (counts.ctypes.data,))])
    for runs, rows in enumerate((1000, 1, 999, 500, 2, 0), start=1):
        before = counts[:, 0].copy()
        program.run(rows=rows)
        assert counts[:, 0].tolist() == [*(before[:rows] + 1), *before[rows:]], runs
        assert (counts[:rows, 2] == rows).all()
    assert set(counts[:, 1]) <= set(range(num_threads))


@pytest.mark.parametrize(
    ("rows", "share", "groups", "items"), [(10, 4, 1, 3), (8, 4, 3, 6), (0, 4, 2, 0), (1, 96, 5, 5)]
)
def test_items_of_a_launch(rows: int, share: int, groups: int, items: int) -> None:
    code = Code()
    kernel, counts = count_items(code), new_counts(12)
    LaunchProgram(Team(code, 2), [KernelLaunch(kernel, "rows", share, groups, (counts.ctypes.data,))]).run(rows=rows)
    assert counts[:, 0].tolist() == [1] * items + [0] * (12 - items)


def mix_items(code: Code) -> str:
    """A kernel whose item sums what all items of another launch wrote; an item too late would give another sum."""

    def body(emit: Emitter, item: Int, _: Int, count: Int, source: Int, into: Int) -> None:
        """into[item] = the sum of source[k] * (k + item + 1), modulo a prime."""
        value = emit.builder.alloca(emit.integer(0).value.type)
        emit.builder.store(emit.integer(0).value, value)

        def add(k: Int, _: list[object]) -> None:
            total = Int(emit, emit.builder.load(value)) + emit.load_int(source + k * 8) * (k + item + 1)
            emit.builder.store((total % 1_000_003).value, value)

        emit.loop(0, count, 1, add)  # type: ignore[arg-type]
        emit.builder.store(emit.builder.load(value), emit.pointer(into + item * 8, emit.integer(0).value.type))

    return code.kernel("mix", 3, body)


def mixed(numbers: NDArray[np.int64], items: int) -> NDArray[np.int64]:
    """What items of `mix_items` write."""
    place = np.arange(len(numbers))
    result: NDArray[np.int64] = (numbers[None] * (place[None] + np.arange(items)[:, None] + 1)).sum(1) % 1_000_003
    return result


@pytest.mark.parametrize("num_threads", THREADS)
def test_a_launch_begins_when_the_one_before_has_ended(num_threads: int) -> None:
    code, width = Code(), 61
    kernel = mix_items(code)
    buffers = [np.arange(1, width + 1), np.zeros(width, np.int64)]
    addresses = [buffer.ctypes.data for buffer in buffers]
    launches = [KernelLaunch(kernel, "rows", 1, 1, (addresses[i % 2], addresses[(i + 1) % 2])) for i in range(300)]
    LaunchProgram(Team(code, num_threads), launches).run(rows=width)
    expected = np.arange(1, width + 1)
    for _ in launches:
        expected = mixed(expected, width)
    assert (buffers[0] == expected).all()


@pytest.mark.parametrize("num_threads", THREADS)
def test_what_follows_joined_launches_waits_for_all_of_them(num_threads: int) -> None:
    """Of three launches that join, each writes a third of what the next ones read; one of them may have no items."""
    code, width = Code(), 60
    kernel, third = mix_items(code), width // 3
    buffers = [np.arange(1, width + 1), np.zeros(width, np.int64)]
    launches = []
    for turn in range(150):
        source, into = (buffers[(turn + which) % 2].ctypes.data for which in range(2))
        launches += [
            KernelLaunch(kernel, "rows", 3, 1, (source, into + 8 * third * part), joins=part > 0) for part in range(3)
        ]
        launches.append(KernelLaunch(kernel, "none", 1, 1, (0, 0), joins=True))
    program, expected = LaunchProgram(Team(code, num_threads), launches), np.arange(1, width + 1)
    for _ in range(2):
        program.run(rows=width, none=0)
        for _ in range(150):
            expected = np.tile(mixed(expected, third), 3)
        assert (buffers[0] == expected).all()


@pytest.mark.parametrize("num_threads", THREADS)
def test_launches_of_one_item_run_in_their_order(num_threads: int) -> None:
    """Each launch reads what those before it wrote, small or wide ones; with more rows the small have two items."""
    code, share, width = Code(), 30, 60
    kernel, buffers = mix_items(code), np.zeros((2, width), np.int64)
    launches, steps, turn = list[KernelLaunch](), list[tuple[int, int, int, int]](), 0
    for at, each, joins in [(9, share, False), (20, share, True), (3, share, False), (0, 1, False)] * 40:
        turn += not joins
        source, into = buffers[turn % 2], buffers[(turn + 1) % 2]
        launches.append(KernelLaunch(kernel, "rows", each, 1, (source.ctypes.data, into[at:].ctypes.data), joins=joins))
        steps.append((turn % 2, (turn + 1) % 2, at, each))
    program = LaunchProgram(Team(code, num_threads), launches)
    for rows in (share, 0, 1, share, 0, 2 * share):
        buffers[:], expected = np.arange(2 * width).reshape(2, -1), np.arange(2 * width).reshape(2, -1)
        for source, into, at, each in steps:
            items = -(-rows // each)
            expected[into, at : at + items] = mixed(expected[source, :rows], items)
        program.run(rows=rows)
        assert (buffers == expected).all(), rows


def test_counts_of_several_names() -> None:
    code = Code()
    kernel, first, second = count_items(code), new_counts(9), new_counts(9)
    launches = [
        KernelLaunch(kernel, name, 1, 1, (counts.ctypes.data,)) for name, counts in (("rows", first), ("tiles", second))
    ]
    LaunchProgram(Team(code, 2), launches).run(tiles=4, rows=7, others=1)
    assert first[:, 0].sum() == 7
    assert second[:, 0].sum() == 4


@pytest.mark.parametrize("arguments", [(), (1, 2)])
def test_a_launch_with_a_wrong_number_of_arguments(arguments: tuple[int, ...]) -> None:
    code = Code()
    with pytest.raises(AssertionError, match=f"count_items has 2 arguments, its launch {1 + len(arguments)}"):
        LaunchProgram(Team(code, 1), [KernelLaunch(count_items(code), "rows", 1, 1, arguments)])


def test_a_wrong_launch_fails_when_it_is_recorded() -> None:
    kernels = CpuKernels()
    kernel = count_items(kernels.code)
    with kernels.recording() as recording:
        kernels._launch(KernelLaunch(kernel, "rows", 1, 1, (0,)), 1)
        with pytest.raises(AssertionError, match="count_items has 2 arguments, its launch 3"):
            kernels._launch(KernelLaunch(kernel, "rows", 1, 1, (0, 0)), 1)
    assert len(recording.launches) == 1


def test_without_openmp_one_thread_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teams, "symbol", lambda library, name: None)
    code = Code()
    kernel, counts = count_items(code), new_counts(50)
    team = Team(code, 4)
    assert team.num_threads == 1
    LaunchProgram(team, [KernelLaunch(kernel, "rows", 1, 1, (counts.ctypes.data,))]).run(rows=50)
    assert counts[:, 0].tolist() == [1] * 50


def _work_without_end() -> None:
    while True:
        pass


@contextmanager
def busy_cores(number: int) -> Iterator[None]:
    """Other processes that want the cores all the time."""
    processes = [multiprocessing.get_context("spawn").Process(target=_work_without_end) for _ in range(number)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_more_threads_than_cores_beside_other_work() -> None:
    """Nobody waits for a thread that has no core longer than its item takes; the bits are those of one thread."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(300, 70, generator=generator), torch.randn(2000, 70, generator=generator)
    expected = CpuLinear(weight, None, CpuKernels(1))(x)
    linear = CpuLinear(weight, None, CpuKernels(16))
    with busy_cores(3):
        for _ in range(20):
            assert torch.equal(linear(x), expected)
