"""What is noted of the launches of a part, and what becomes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher

from executor_svc.gpu.kernels.gpu_kernels import GpuRecording
from executor_svc.gpu.launches import watching
from executor_svc.gpu.launches.noting import NotedLaunches, Noting, Scratch, noting_now
from executor_svc.gpu.launches.repeated import RepeatedParts
from executor_svc.gpu.linear import Fp8Linear
from tests.executor_svc.gpu.repeating import tell_of_launches


def noted(enqueue: Callable[[], object]) -> Noting:
    with Noting(Scratch()) as noting:
        enqueue()
    return noting


def test_operations_are_repeated_at_their_addresses() -> None:
    x, weight, out, bias = torch.randn(4, 8), torch.randn(3, 8), torch.zeros(4, 3), torch.randn(3)

    def enqueue() -> None:
        torch.mm(x[:2], weight.t(), out=out[:2])
        torch.addmm(bias, x[2:], weight.t(), out=out[2:])
        out.mul_(2)

    launches = noted(enqueue).launches()
    assert len(launches) == 3
    x.copy_(torch.randn(4, 8))
    out.zero_()
    launches.launch()
    expected = torch.zeros_like(out)
    torch.mm(x[:2], weight.t(), out=expected[:2])
    torch.addmm(bias, x[2:], weight.t(), out=expected[2:])
    assert torch.equal(out, expected * 2)


@pytest.mark.parametrize(
    ("what", "enqueue"),
    [
        ("a copy", lambda x: x.double()),
        ("a result", lambda x: x + 1),
        ("a number on the host", lambda x: x.sum().item()),
        ("memory with numbers", lambda x: torch.zeros_like(x)),
    ],
)
def test_what_has_memory_of_its_own_is_refused(what: str, enqueue: Callable[[Tensor], object]) -> None:
    noting = noted(lambda: enqueue(torch.ones(3)))
    assert noting.refusal is not None, what
    assert noting_now() is None


def test_a_kernel_of_which_no_launcher_tells_is_refused() -> None:
    def enqueue() -> None:
        knobs.runtime.launch_enter_hook(None)

    assert noted(enqueue).refusal == "a kernel that was loaded before launches were watched"
    assert not knobs.runtime.launch_enter_hook.calls


def test_a_part_is_noted_when_it_runs_again_and_the_oldest_is_forgotten() -> None:
    parts, x, ran = RepeatedParts(stream=lambda: 0, most=2), torch.zeros(1), list[str]()

    def run(part: str) -> None:
        parts.run(part, lambda: (ran.append(part), x.add_(1)))

    for _ in range(4):
        run("a")
    assert ran == ["a", "a"]
    assert x.item() == 4
    for part in ("b", "a", "c", "a", "b"):
        run(part)
    assert ran == ["a", "a", "b", "c", "b"]
    assert x.item() == 9


def test_a_refused_part_ends_all_repeats() -> None:
    parts, x, out = RepeatedParts(stream=lambda: 0), torch.zeros(1), []
    for _ in range(3):
        parts.run("repeated", lambda: x.add_(1))
    for _ in range(2):
        parts.run("refused", lambda: out.append(x + 1))
    assert not parts.usable
    x.zero_()
    ran = []
    parts.run("repeated", lambda: ran.append(x.add_(1)))
    assert ran == [x]


def test_the_start_finds_repeats_that_differ(caplog: pytest.LogCaptureFixture) -> None:
    calls, out = list[int](), torch.zeros(2)

    def differs() -> None:
        calls.append(1)
        out.fill_(len(calls))

    parts = RepeatedParts(stream=lambda: 0)
    parts.probe(lambda: out.fill_(3), out)
    assert parts.usable
    parts.probe(differs, out)
    assert not parts.usable
    assert "other results" in caplog.text


def test_the_start_goes_on_where_a_repeat_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: NotedLaunches) -> None:
        raise TypeError("an argument is missing")

    monkeypatch.setattr(NotedLaunches, "launch", fails)
    parts, out = RepeatedParts(stream=lambda: 0), torch.zeros(2)
    parts.probe(lambda: out.fill_(3), out)
    assert not parts.usable
    parts.run("part", lambda: out.fill_(4))
    assert out.tolist() == [4, 4]


def test_launches_of_an_unknown_triton_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        launcher_cls = CudaLauncher

    monkeypatch.setattr(type(watching.driver), "active", Driver)
    gpu = torch.device("cuda")
    monkeypatch.setattr(watching.triton, "__version__", "3.7.0")
    watching.watch_launches()
    assert not watching.are_watched(gpu)
    monkeypatch.setattr(watching.triton, "__version__", "3.6.1")
    watching.watch_launches()
    assert watching.are_watched(gpu)
    assert not watching.are_watched(torch.device("cpu"))


def test_operations_have_the_same_scratch_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each allocates rows in fp8 and their scales."""
    tell_of_launches(monkeypatch)
    linears = [Fp8Linear(torch.randn(32, 32, dtype=torch.bfloat16), None) for _ in range(3)]
    rows = [torch.randn(16, 32, dtype=torch.bfloat16) for _ in range(4)]
    recording = GpuRecording()
    for linear, x, y in zip(linears, rows, rows[1:], strict=False):
        recording.operations.append(("rows", lambda n, linear=linear, x=x, y=y: linear(x[:n], y[:n])))
    program, scratch = recording.program(), Scratch()
    with Noting(scratch) as noting:
        program.run(rows=16)
    launches = noting.launches()
    assert scratch.take(0, torch.device("cpu")).storage_offset() == 16 * 32 + 256  # bytes of fp8, then scales
    rows[0].copy_(torch.randn(16, 32))
    program.run(rows=16)
    expected = rows[-1].clone()
    rows[-1].zero_()
    launches.launch()
    assert torch.equal(rows[-1], expected)


def test_launches_of_other_threads_are_not_noted() -> None:
    x = torch.zeros(1)

    def elsewhere() -> None:
        assert noting_now() is None
        knobs.runtime.launch_enter_hook(None)
        x.add_(1)

    def enqueue() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        x.add_(1)

    launches = noted(enqueue).launches()
    assert x.item() == 2
    assert len(launches) == 1
