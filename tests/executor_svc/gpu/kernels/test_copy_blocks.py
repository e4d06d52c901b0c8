"""Copies of blocks: bit by bit, in all layers, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor_svc.gpu.kernels.copy_blocks import copy_blocks

WORDS = 4096
"""Of 4 bytes: what a program moves."""


def random_bytes(shape: tuple[int, ...], device: torch.device, seed: int = 0) -> Tensor:
    """Any bits: NaNs of every kind among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)


def ids(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_any_dtype(dtype: torch.dtype, device: torch.device) -> None:
    raw = random_bytes((2, 7, 2, 2, 8, 16 * dtype.itemsize), device)
    expected = raw.clone()
    expected[:, [4, 0, 6]] = raw[:, [1, 5, 3]]
    copy_blocks(raw.view(dtype), raw.view(dtype), ids([1, 5, 3], device), ids([4, 0, 6], device), 3)
    assert torch.equal(raw, expected)


@pytest.mark.parametrize("words", [4, WORDS - 4, WORDS, WORDS + 4, 2 * WORDS + 12])
def test_sizes_of_a_block(words: int, device: torch.device) -> None:
    raw = random_bytes((2, 4, words * 4), device)
    expected = raw.clone()
    expected[:, [2, 0]] = raw[:, [1, 3]]
    copy_blocks(raw, raw, ids([1, 3], device), ids([2, 0], device), 2)
    assert torch.equal(raw, expected)


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_pool_to_staging_and_back(data: st.DataObject, device: torch.device) -> None:
    layers, blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    named = data.draw(st.lists(st.integers(0, blocks - 1), unique=True))
    pool = random_bytes((layers, blocks, 48), device, 1)
    staging = random_bytes((7, layers, 48), device, 2)
    before = staging.clone()
    copy_blocks(pool, staging.transpose(0, 1), ids(named, device), None, len(named))
    assert torch.equal(staging[: len(named)], pool[:, named].transpose(0, 1))
    assert torch.equal(staging[len(named) :], before[len(named) :])
    other = random_bytes((layers, blocks, 48), device, 3)
    expected = other.clone()
    expected[:, named] = pool[:, named]
    copy_blocks(staging.transpose(0, 1), other, None, ids(named, device), len(named))
    assert torch.equal(other, expected)


def test_ids_beyond_the_pairs_are_not_read(device: torch.device) -> None:
    raw = random_bytes((1, 3, 16), device)
    expected = raw.clone()
    expected[:, 2] = raw[:, 0]
    copy_blocks(raw, raw, ids([0, 1 << 40], device), ids([2, 1 << 40], device), 1)
    assert torch.equal(raw, expected)


def test_refusals(device: torch.device) -> None:
    pool = random_bytes((2, 4, 32), device)
    one = ids([0], device)
    with pytest.raises(ValueError, match=r"source: .*multiple of 16 bytes"):
        copy_blocks(pool[:, :, :24].contiguous(), pool, one, one, 1)
    with pytest.raises(ValueError, match=r"source: .*not contiguous"):
        copy_blocks(random_bytes((2, 4, 16, 2), device).transpose(2, 3), pool, one, one, 1)
    with pytest.raises(ValueError, match="source: not"):
        copy_blocks(pool[0], pool, one, one, 1)
    with pytest.raises(ValueError, match="target: layers"):
        copy_blocks(pool, pool[:1], one, one, 1)
    with pytest.raises(ValueError, match="source_ids: must be 2"):
        copy_blocks(pool, pool, one, ids([0, 1], device), 2)
    with pytest.raises(ValueError, match="target_ids: must be 1"):
        copy_blocks(pool, pool, one, one.int(), 1)
    with pytest.raises(ValueError, match="target_ids: 5 pairs for 4"):
        copy_blocks(pool, pool, ids([0] * 5, device), None, 5)
