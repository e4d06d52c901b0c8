"""CUDA graphs without a GPU: which sizes there are, and what is done to capture them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from executor_svc.gpu.graphs import CudaGraphs, decode_sizes, draft_sizes, mixed_sizes, smallest_fitting
from executor_svc.gpu.kernels.slots.slots import StepSizes


@pytest.mark.parametrize(
    ("most", "last"), [(1, [1]), (5, [4, 5]), (64, [56, 64]), (100, [96, 100]), (2000, [496, 512])]
)
def test_decodes_reach_the_most_sequences(most: int, last: list[int]) -> None:
    sizes = decode_sizes(most)
    counts = [each.num_seqs for each in sizes]
    assert sizes == [StepSizes.decode(count) for count in counts]
    assert counts == sorted(set(counts))
    assert counts[-len(last) :] == last


@pytest.mark.parametrize(
    ("max_rows", "max_drafts", "counts", "last"),
    [
        (256, 5, [1, 3, 5], [(128, 1), (64, 3), (42, 5)]),
        (256, 4, [1, 3, 4], [(128, 1), (64, 3), (51, 4)]),
        (6, 5, [1, 3, 5], [(3, 1), (1, 3), (1, 5)]),
        (4, 64, [1, 3], [(2, 1), (1, 3)]),
        (1, 3, [], []),
        (256, 0, [], []),
    ],
)
def test_decodes_with_drafts_have_graphs_within_the_rows_of_logits(
    max_rows: int, max_drafts: int, counts: list[int], last: list[tuple[int, int]]
) -> None:
    sizes = draft_sizes(max_rows, max_drafts)
    assert sorted({each.num_drafts for each in sizes}) == counts
    for each in sizes:
        assert each == StepSizes.decode(each.num_seqs, each.num_drafts)
        assert each.num_logits == each.num_tokens == each.num_seqs * (1 + each.num_drafts) <= max_rows
    assert [(max(one.num_seqs for one in sizes if one.num_drafts == count), count) for count in counts] == last
    assert len(set(sizes)) == len(sizes) < 40


def test_mixed_steps_are_of_few_sequences_or_many() -> None:
    sizes = mixed_sizes(max_tokens=8192, max_seqs=256, num_parameters=600_000_000)
    assert [(each.num_tokens, each.num_seqs) for each in sizes[:7]] == [
        (32, 16), (32, 32), (64, 16), (64, 64), (96, 16), (96, 64), (96, 96),
    ]  # fmt: skip
    assert sizes[-1] == StepSizes(2048, 256, 0, 0)
    assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize(
    ("max_tokens", "num_parameters", "longest"),
    [(40, 10**6, 40), (8192, 8 * 10**9, 240), (8192, 70 * 10**9, None), (31, 10**6, None)],
)
def test_mixed_steps_that_hide_their_launches_have_no_graph(
    max_tokens: int, num_parameters: int, longest: int | None
) -> None:
    sizes = mixed_sizes(max_tokens, 16, num_parameters)
    assert (sizes[-1].num_tokens if sizes else None) == longest


def test_the_least_size_that_holds_a_step_is_taken() -> None:
    decodes = [StepSizes.decode(count) for count in (1, 2, 8)]
    assert [smallest_fitting(decodes, StepSizes.decode(count)) for count in (1, 2, 3, 8, 9)] == [
        *decodes[:2],
        *[decodes[2]] * 2,
        None,
    ]
    few, many, long = StepSizes(32, 4, 0, 0), StepSizes(32, 16, 0, 0), StepSizes(64, 4, 0, 0)
    mixed = [few, many, long, StepSizes(64, 16, 0, 0)]
    assert smallest_fitting(mixed, StepSizes(5, 4, 0, 0)) == few
    assert smallest_fitting(mixed, StepSizes(32, 5, 0, 0)) == many
    assert smallest_fitting(mixed, StepSizes(33, 4, 0, 0)) == long
    assert smallest_fitting(mixed, StepSizes(33, 17, 0, 0)) is None


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of torch.cuda, in order."""
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
    def capture(graph: Graph, pool: str | None = None, capture_error_mode: str = "") -> Iterator[None]:
        assert capture_error_mode == "global", "no thread of a group of ranks asks for events"
        calls.append(f"capture {graph.number} in {pool}")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    return calls


def test_each_step_is_run_before_it_is_captured_the_largest_first_in_one_pool(done: list[Any]) -> None:
    collects = []
    one, four = StepSizes.decode(1), StepSizes.decode(4)

    def step(sizes: StepSizes) -> None:
        done.append(sizes)
        collects.append(gc.isenabled())

    graphs = CudaGraphs((one, four), step)
    assert done == [four, "wait", "new", "capture 0 in None", four, one, "wait", "new", "capture 1 in pool 0", one]
    assert not any(collects)
    assert gc.isenabled()
    graphs.replay(four)
    assert done[-1] == "replay 0"
