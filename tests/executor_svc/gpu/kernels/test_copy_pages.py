"""Copies of pages: bit by bit, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor_svc.gpu.kernels.copy_pages import copy_pages

WORDS = 4096
"""Of 4 bytes: what a program moves."""


def random_bytes(shape: tuple[int, ...], device: torch.device, seed: int = 0) -> Tensor:
    """Any bits: NaNs of every kind among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)


def ids(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@pytest.mark.parametrize("words", [4, WORDS - 4, WORDS, WORDS + 4, 2 * WORDS + 12])
def test_sizes_of_a_page(words: int, device: torch.device) -> None:
    raw = random_bytes((4, words * 4), device)
    expected = raw.clone()
    expected[[2, 0]] = raw[[1, 3]]
    copy_pages(raw, raw, ids([1, 3], device), ids([2, 0], device), 2)
    assert torch.equal(raw, expected)


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_pool_to_staging_and_back(data: st.DataObject, device: torch.device) -> None:
    pages = data.draw(st.integers(1, 6))
    named = data.draw(st.lists(st.integers(0, pages - 1), unique=True))
    pool = random_bytes((pages, 48), device, 1)
    staging = random_bytes((7, 48), device, 2)
    before = staging.clone()
    copy_pages(pool, staging, ids(named, device), None, len(named))
    assert torch.equal(staging[: len(named)], pool[named])
    assert torch.equal(staging[len(named) :], before[len(named) :])
    other = random_bytes((pages, 48), device, 3)
    expected = other.clone()
    expected[named] = pool[named]
    copy_pages(staging, other, None, ids(named, device), len(named))
    assert torch.equal(other, expected)


def test_ids_beyond_the_pairs_are_not_read(device: torch.device) -> None:
    raw = random_bytes((3, 16), device)
    expected = raw.clone()
    expected[2] = raw[0]
    copy_pages(raw, raw, ids([0, 1 << 40], device), ids([2, 1 << 40], device), 1)
    assert torch.equal(raw, expected)


def test_refusals(device: torch.device) -> None:
    pool = random_bytes((4, 32), device)
    one = ids([0], device)
    with pytest.raises(ValueError, match=r"source: .*multiple of 16 bytes"):
        copy_pages(pool[:, :24].contiguous(), pool, one, one, 1)
    for wrong in (pool[:, :16], pool[0], pool.view(torch.int32)):
        with pytest.raises(ValueError, match="source: must be contiguous"):
            copy_pages(wrong, pool, one, one, 1)
    with pytest.raises(ValueError, match="target: 4 words of a page are not source's 8"):
        copy_pages(pool, pool[:, :16].contiguous(), one, one, 1)
    with pytest.raises(ValueError, match="source_ids: must be 2"):
        copy_pages(pool, pool, one, ids([0, 1], device), 2)
    with pytest.raises(ValueError, match="target_ids: must be 1"):
        copy_pages(pool, pool, one, one.int(), 1)
    with pytest.raises(ValueError, match="target_ids: 5 pairs for 4"):
        copy_pages(pool, pool, ids([0] * 5, device), None, 5)
