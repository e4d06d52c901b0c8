"""The GPU's operations of latent attention against their float64 meanings: rows of the cache, then what tokens find."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from executor_svc.device import reference
from executor_svc.device.kernels import KVScales, Rope
from executor_svc.device.kv_layout import KVLayout, LayerKV
from executor_svc.device.latent import latent_shape, padded_latent
from executor_svc.gpu.kernels.rope import FP8
from executor_svc.gpu.latent import GpuLatentKernels
from tests.executor_svc.driver import flat_batch
from tests.executor_svc.gpu.kernels.attention.cases import ARCH

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CHUNKS = [(0, 9), (33, 1), (17, 4)]
TABLES = [[7, 2], [1, 4, 8, 5, 9], [3, 6, 10]]
NUM_BLOCKS, LONGEST, EPS = 12, 64, 1e-6
TOLERANCES = {F32: (1e-4, 1e-5), F16: (1e-2, 1e-2), BF16: (3e-2, 8e-2)}


@dataclass(frozen=True)
class Sizes:
    """Of a layer."""

    heads: int = 4
    latent: int = 32
    rope: int = 16
    nope: int = 24
    value: int = 20


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(
    sizes: Sizes,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int = 8,
    wide: bool = False,
    fp8: bool = False,
    scaled_queries: bool = True,
) -> None:
    """Write whole sequences, attend those of the chunks; wide: norm and angles in fp32."""
    heads, latent, rope = sizes.heads, sizes.latent, sizes.rope
    shape = latent_shape(heads, latent, rope, (sizes.nope + rope) ** -0.5)
    kernels, first = GpuLatentKernels(device, ARCH, 8), padded_latent(latent)
    layout = KVLayout.of([LayerKV(1, shape.padded_head_size, parts=1)] * 3, block_size, FP8 if fp8 else dtype)
    pool = torch.full((NUM_BLOCKS, layout.page_bytes), 0xFF, dtype=torch.uint8, device=device)
    layer, angles = layout.views(pool)[1], randn(1, LONGEST, rope // 2) * 3
    both, narrow = torch.cat([angles, angles], -1), torch.float32 if wide else dtype
    sin = both.sin()
    sin[:, : rope // 2] *= -1
    factors = (1 + randn(2, LONGEST).abs()).to(dtype)
    norm, scales = (randn(3, latent) + 1).to(narrow), None
    if fp8:
        scales = KVScales(*[torch.full((1,), 0.25, device=device)] * 2)

    def ropes(positions: Tensor) -> Rope:
        tables = both.cos().to(narrow).to(device), sin.to(narrow).to(device), positions.to(device)
        return Rope(*tables, factors.to(device) if scaled_queries else None)

    whole = flat_batch([(0, sum(chunk)) for chunk in CHUNKS], TABLES, block_size, [0] * sum(map(sum, CHUNKS)))
    kv = randn(4, len(whole.positions), 5 + latent + rope).to(dtype)[:, 5:]
    plan = kernels.new_attention_plan(shape, LONGEST, 80)
    plan.fill(whole.slot_mapping, whole.query_start_loc, whole.seq_lens, whole.block_tables)
    around = pool.clone()
    kernels.write_latents(kv.to(device), norm.to(device), EPS, ropes(whole.positions), layer, shape, plan, scales)
    assert not layout.views(pool)[0].view(torch.uint8).ne(layout.views(around)[0].view(torch.uint8)).any()
    assert not layout.views(pool)[2].view(torch.uint8).ne(layout.views(around)[2].view(torch.uint8)).any()
    stored = layer.float().cpu() * (0.25 if fp8 else 1.0)
    written = stored[whole.slot_mapping // block_size, 0, 0, whole.slot_mapping % block_size]
    rows = reference.latent_rows(kv, norm, EPS, angles[whole.positions].double())
    found = torch.cat([written[:, :latent], written[:, first : first + rope]], -1).double()
    rtol, atol = (0.07, 0.01) if fp8 else TOLERANCES[dtype]
    torch.testing.assert_close(found, rows, rtol=rtol, atol=atol)
    assert not written[:, latent:first].any()
    assert not written[:, first + rope :].any()

    batch = flat_batch(CHUNKS, TABLES, block_size, [0] * sum(count for _, count in CHUNKS))
    q = randn(5, len(batch.positions), 3 + heads * (sizes.nope + rope)).to(dtype)[:, 3:]
    absorb = (randn(6, heads, latent, sizes.nope) / sizes.nope**0.5).to(dtype)
    expand = (randn(7, heads, sizes.value, latent) / latent**0.5).to(dtype)
    split = q.unflatten(1, (heads, -1)).double()
    turned = reference.rope(split[..., sizes.nope :], angles[batch.positions].double())
    rotated = torch.cat([split[..., : sizes.nope], turned], -1)
    if scaled_queries:
        rotated = rotated * factors[batch.positions].double()[:, None, None]
    kept = torch.cat([stored[..., :latent], stored[..., first : first + rope]], -1)
    where = batch.query_start_loc, batch.seq_lens, batch.block_tables, shape.scale
    expected = reference.latent_attention(rotated, absorb, expand, kept, *where)
    linears = kernels.head_linear(absorb.to(device)), kernels.head_linear(expand.to(device))
    plan.fill(batch.slot_mapping, batch.query_start_loc, batch.seq_lens, batch.block_tables)
    attended = kernels.latent_attention(q.to(device), ropes(batch.positions), *linears, layer, shape, plan, scales)
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(attended.cpu().double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("wide", [False, True])
def test_dtypes(dtype: torch.dtype, wide: bool, device: torch.device) -> None:
    check(Sizes(), dtype, device, wide=wide)


@pytest.mark.parametrize(
    "sizes", [Sizes(4, 20, 8, 12, 20), Sizes(5, 40, 6, 7, 33), Sizes(1, 16, 64, 40, 64), Sizes(40, 16, 8, 16, 16)]
)
def test_sizes_that_are_padded(sizes: Sizes, device: torch.device) -> None:
    check(sizes, F32, device, block_size=16, scaled_queries=False)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_fp8_cache(dtype: torch.dtype, device: torch.device) -> None:
    """One scale, for a row is key and value."""
    check(Sizes(4, 20, 8, 12, 20), dtype, device, fp8=True)
