"""Norms of values, keys that are the values too, and rows of queries alone, beside the write of keys and values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from executor_svc.device import reference
from executor_svc.device.kernels import HeadNorms
from tests.executor_svc.gpu.kernels.test_rope import EPS, UNIT, new_step, randn


@pytest.mark.parametrize("dtype", list(UNIT))
@pytest.mark.parametrize("sizes", [(4, 2, 64, 64), (4, 4, 80, 32), (2, 1, 512, 512), (3, 3, 24, 0)])
def test_norms_of_values_and_keys_as_values(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Queries and keys are those of a step with values; the values are normalized, of whatever linear they are."""
    step = new_step(0, 5, sizes, 16, dtype)
    (num_heads, kv_heads, _), size = step.heads, sizes[2]
    weights = [(1 + randn(i, size) / 4).to(device) for i in (2, 3)]
    norms = HeadNorms(*weights, EPS, v=torch.ones(size, device=device))
    q, cache, _ = step.run(device, step.new_cache(dtype), norms=HeadNorms(*weights, EPS))
    found, own, _ = step.run(device, step.new_cache(dtype), norms=norms)
    heads, blocks, offsets = step.qkv.view(5, -1, size), step.slots // 16, step.slots % 16
    assert torch.equal(found, q)
    assert torch.equal(own[:, 0], cache[:, 0])
    without = replace(step, qkv=step.qkv[:, : (num_heads + kv_heads) * size].contiguous())
    same, keys, _ = without.run(device, step.new_cache(dtype), norms=norms)
    assert torch.equal(same, q)
    assert torch.equal(keys[:, 0], cache[:, 0])
    for layer, first in ((own, num_heads + kv_heads), (keys, num_heads)):
        expected = reference.rms_norm(heads[:, first : first + kv_heads], torch.ones(size), EPS)
        values = layer[blocks, 1, :, offsets].double()
        torch.testing.assert_close(values, expected, rtol=UNIT[dtype] * 1.01 + 2**-20, atol=2**-24)


def test_queries_alone_write_nothing(device: torch.device) -> None:
    step = new_step(0, 5, (4, 2, 64, 64), 16, torch.bfloat16)
    weights = [(1 + randn(i, 64) / 4).to(device) for i in (2, 3)]
    q, _, _ = step.run(device, step.new_cache(step.dtype), norms=HeadNorms(*weights, EPS))
    alone = replace(step, qkv=step.qkv[:, : 4 * 64].contiguous())
    found, cache, _ = alone.run(device, step.new_cache(step.dtype), norms=HeadNorms(weights[0], weights[0], EPS))
    assert torch.equal(found, q)
    assert not cache.any()
