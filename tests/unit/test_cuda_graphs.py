"""CUDA graphs without a GPU: which sizes there are, and what is done to capture them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from executor_svc.cuda_graphs import CudaGraphs, fitting, graph_sizes


@pytest.mark.parametrize(
    ("most", "last"), [(1, [1]), (5, [4, 8]), (64, [56, 64]), (100, [96, 104]), (2000, [496, 512])]
)
def test_sizes_reach_the_most_sequences(most: int, last: list[int]) -> None:
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert list(sizes[-len(last) :]) == last


def test_the_least_size_that_holds_a_step_is_taken() -> None:
    assert [fitting((1, 2, 8), count) for count in (1, 2, 3, 8, 9)] == [1, 2, 8, 8, None]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of torch.cuda, in order."""
    calls: list[Any] = []

    class Graph:
        def __init__(self) -> None:
            self.number = sum(call == "new" for call in calls)
            calls.append("new")

        def pool(self) -> str:
            return f"pool {self.number}"

        def replay(self) -> None:
            calls.append(f"replay {self.number}")

    @contextlib.contextmanager
    def capture(graph: Graph, pool: str | None = None) -> Iterator[None]:
        calls.append(f"capture {graph.number} in {pool}")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    return calls


def test_each_step_is_run_before_it_is_captured_the_largest_first_in_one_pool(done: list[Any]) -> None:
    collects = []

    def step(size: int) -> None:
        done.append(size)
        collects.append(gc.isenabled())

    graphs = CudaGraphs((1, 4), step)
    assert done == [4, "wait", "new", "capture 0 in None", 4, 1, "wait", "new", "capture 1 in pool 0", 1]
    assert not any(collects)
    assert gc.isenabled()
    graphs.replay(4)
    assert done[-1] == "replay 0"
