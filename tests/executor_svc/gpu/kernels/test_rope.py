"""Norms of heads, rotary embedding and the write to the cache, against their float64 meanings in a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor_svc.device import reference
from executor_svc.device.kernels import AttentionShape, HeadNorms, KVScales
from executor_svc.gpu.kernels.rope import FP8, rope_write_kv

UNIT = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""The largest relative error of rounding to nearest."""
NAN = float("nan")
POSITIONS, BLOCKS = 40, 6
EPS = 1e-6

dtypes = st.sampled_from(list(UNIT))
sizes = st.sampled_from(
    [
        # query heads, KV heads, head size, columns that are rotated
        *((1, 1, 8, 8), (4, 2, 64, 64), (9, 3, 64, 64), (3, 1, 80, 80), (4, 4, 80, 32), (5, 5, 40, 10), (2, 1, 96, 96)),
        *((12, 2, 128, 128), (16, 1, 128, 64), (33, 3, 64, 64), (6, 2, 256, 256), (2, 2, 24, 2)),
    ]
)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Step:
    """Inputs of one launch, on the CPU; what must not be read is NaN."""

    shape: AttentionShape
    rotated: int
    qkv: Tensor
    angles: Tensor
    positions: Tensor
    slots: Tensor
    block_size: int

    @property
    def dtype(self) -> torch.dtype:
        return self.qkv.dtype

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads

    def tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin [POSITIONS, R], NaN where no token is."""
        cos, sin = self.angles.cos(), self.angles.sin()
        unused = torch.ones(POSITIONS, dtype=torch.bool)
        unused[self.positions] = False
        both = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        return tuple(table.masked_fill(unused[:, None], NAN).to(self.dtype) for table in both)

    def new_cache(self, dtype: torch.dtype) -> Tensor:
        """One of two layers whose blocks lie side by side."""
        kv_heads, size = self.shape.num_kv_heads, self.shape.head_size
        memory = torch.zeros(BLOCKS, 2, 2, kv_heads, self.block_size, size)
        memory[:, 0] = NAN
        return memory.to(dtype)[:, 1]

    def run(
        self,
        device: torch.device,
        cache: Tensor,
        by_position: bool = True,
        in_place: bool = False,
        gates: int = 0,
        **more: Any,
    ):
        """Return q [T, H, D], the cache, and qkv afterwards; gates: heads before the queries of each row."""
        cos, sin = self.tables()
        if not by_position:
            cos, sin = cos[self.positions], sin[self.positions]
        tokens, (num_heads, _, _) = self.qkv.shape[0], self.heads
        before = gates * self.shape.head_size
        around = torch.full((tokens + 2, before + self.qkv.shape[1]), NAN, dtype=self.dtype, device=device)
        qkv = around[1:-1, before:]
        qkv.copy_(self.qkv)
        q_out = torch.full((tokens, num_heads, self.shape.head_size), NAN, dtype=self.dtype, device=device)
        memory = cache._base.to(device)
        kept = memory[:, 1]
        rope_write_kv(
            qkv,
            cos.to(device),
            sin.to(device),
            self.positions.to(device) if by_position else None,
            kept,
            self.slots.to(device),
            num_heads,
            q_out=None if in_place else q_out,
            **more,
        )
        assert bool(around[[0, -1]].isnan().all()), "rows that are not there are not written"
        assert bool(around[:, :before].isnan().all()), "gates are not written"
        assert bool(memory[:, 0].float().isnan().all()), "the other layer is not written"
        q = qkv.view(tokens, -1, self.shape.head_size)[:, :num_heads] if in_place else q_out
        return q.cpu(), kept.cpu(), qkv.cpu()


def new_step(
    seed: int, tokens: int, sizes: tuple[int, int, int, int], block_size: int, dtype: torch.dtype, padding: int = 0
) -> Step:
    num_heads, kv_heads, head_size, rotated = sizes
    generator = torch.Generator().manual_seed(seed)
    shape = AttentionShape(num_heads, kv_heads, head_size, head_size, 1.0)
    qkv = randn(seed, tokens + padding, (num_heads + 2 * kv_heads) * head_size).to(dtype)
    qkv[tokens:] = NAN
    slots = torch.randperm(BLOCKS * block_size, generator=generator)[: tokens + padding]
    slots[tokens:] = -1
    positions = torch.randint(0, POSITIONS, (tokens + padding,), generator=generator)
    angles = randn(seed + 1, POSITIONS, rotated // 2).double() * 3
    return Step(shape, rotated, qkv, angles, positions, slots, block_size)


def check(step: Step, q: Tensor, cache: Tensor, norms: HeadNorms | None) -> None:
    """q and the cache against float64; both zero (cache) or unread where no token is."""
    (num_heads, kv_heads, _), size = step.heads, step.shape.head_size
    written = step.slots >= 0
    wide = step.qkv.double()
    if norms is not None:
        wide = reference.norm_heads(step.qkv, norms.q.cpu(), norms.k.cpu(), EPS, step.shape)
    heads = wide.view(wide.shape[0], -1, size)[written]
    turned = heads[:, : num_heads + kv_heads]
    expected = reference.rope(turned, step.angles[step.positions[written]])
    # Each pair: cos, sin and both norms are rounded, then both products, then the sum.
    low, high, rest = turned.abs().split([step.rotated // 2, step.rotated // 2, size - step.rotated], -1)
    pairs = torch.cat([low + high, low + high, rest], -1)
    error = pairs * (6 * UNIT[step.dtype] + 2**-20) + (2**-22 if step.dtype == torch.float16 else 0.0)
    assert bool(((q[written].double() - expected[:, :num_heads]).abs() <= error[:, :num_heads]).all())

    found = torch.zeros(BLOCKS, 2, kv_heads, step.block_size, size, dtype=torch.float64)
    room = torch.zeros_like(found)
    values = heads[:, num_heads + kv_heads :]
    reference.write_kv(found, expected[:, num_heads:], values, step.slots[written])
    reference.write_kv(room, error[:, num_heads:], torch.zeros_like(values), step.slots[written])
    assert bool(((cache.double() - found).abs() <= room).all())


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 6),
    sizes=sizes,
    block_size=st.sampled_from([8, 16, 24, 64]),
    dtype=dtypes,
    in_place=st.booleans(),
    norms=st.sampled_from(["none", "narrow", "wide"]),
    padding=st.integers(0, 2),
    gates=st.sampled_from([0, 0, 3]),
)
def test_all_at_once(
    seed: int,
    tokens: int,
    sizes: tuple[int, int, int, int],
    block_size: int,
    dtype: torch.dtype,
    in_place: bool,
    norms: str,
    padding: int,
    gates: int,
    device: torch.device,
) -> None:
    """By position and by row: the same bits; values and what is not requested stay as they are."""
    step = new_step(seed, tokens, sizes, block_size, dtype, padding)
    weights = [1 + randn(seed + i, sizes[2]) / 4 for i in (2, 3)]
    narrow = [weight.to(torch.float32 if norms == "wide" else dtype).to(device) for weight in weights]
    head_norms = None if norms == "none" else HeadNorms(*narrow, EPS)
    q, cache, qkv = step.run(device, step.new_cache(dtype), in_place=in_place, gates=gates, norms=head_norms)
    check(step, q, cache, head_norms)
    kept = sizes[0] * sizes[2] if in_place else 0
    assert torch.equal(qkv[:tokens, kept:], step.qkv[:tokens, kept:])
    again, cache_again, _ = step.run(device, step.new_cache(dtype), by_position=False, norms=head_norms)
    assert torch.equal(again[:tokens], q[:tokens])
    assert torch.equal(cache_again, cache)


@pytest.mark.parametrize("dtype", list(UNIT))
@pytest.mark.parametrize("rotated", [64, 24])
def test_where_it_rounds(dtype: torch.dtype, rotated: int, device: torch.device) -> None:
    """After each product and after their sum, bit by bit, as transformers does."""
    step = new_step(0, 20, (3, 2, 64, rotated), 16, dtype)
    q, cache, _ = step.run(device, step.new_cache(dtype))
    cos, sin = (table[step.positions][:, None] for table in step.tables())
    heads = step.qkv.view(20, -1, 64)
    x = heads[:, :5, :rotated]
    swapped = torch.cat([x[..., rotated // 2 :], x[..., : rotated // 2]], -1)
    expected = heads[:, :5].clone()
    expected[..., :rotated] = x * cos + swapped * sin
    assert torch.equal(q, expected[:, :3])
    blocks, offsets = step.slots // 16, step.slots % 16
    assert torch.equal(cache[blocks, 0, :, offsets], expected[:, 3:])
    assert torch.equal(cache[blocks, 1, :, offsets], heads[:, 5:])


@pytest.mark.parametrize("dtype", list(UNIT))
@pytest.mark.parametrize("rotated", [64, 24])
def test_angles_in_fp32_round_the_sum_alone(dtype: torch.dtype, rotated: int, device: torch.device) -> None:
    step = new_step(0, 20, (3, 2, 64, rotated), 16, dtype)
    cos, sin = step.angles.cos(), step.angles.sin()
    tables = torch.cat([cos, cos], -1).float(), torch.cat([-sin, sin], -1).float()
    step.tables = lambda: tables  # type: ignore[method-assign]
    q, cache, _ = step.run(device, step.new_cache(dtype))
    cos, sin = (table[step.positions][:, None] for table in tables)
    heads = step.qkv.view(20, -1, 64)
    x = heads[:, :5, :rotated].float()
    swapped = torch.cat([x[..., rotated // 2 :], x[..., : rotated // 2]], -1)
    expected = heads[:, :5].clone()
    expected[..., :rotated] = (x * cos + swapped * sin).to(dtype)
    assert torch.equal(q, expected[:, :3])
    assert torch.equal(cache[step.slots // 16, 0, :, step.slots % 16], expected[:, 3:])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", list(UNIT))
@pytest.mark.parametrize("rotated", [40, 16, 0])
@pytest.mark.parametrize("in_place", [False, True])
def test_norms_after_the_rotation_and_scales_of_queries(
    dtype: torch.dtype, rotated: int, in_place: bool, device: torch.device
) -> None:
    """What the rotation alone gives, normalized and multiplied; keys are not multiplied, values stay."""
    step = new_step(1, 25, (3, 1, 40, rotated), 8, dtype)
    weight, scales = (1 + randn(5, 40) / 4).to(dtype), (1 + randn(6, POSITIONS) / 4).to(dtype)
    norms = HeadNorms(weight.to(device), weight.to(device), EPS, "heads after rope")
    plain_q, plain_cache, _ = step.run(device, step.new_cache(dtype))
    more = {"norms": norms, "query_scales": scales.to(device), "in_place": in_place}
    q, cache, qkv = step.run(device, step.new_cache(dtype), **more)
    factors = scales[step.positions].double()[:, None, None]
    error = 4 * UNIT[dtype] + 2**-20
    expected = reference.rms_norm(plain_q, weight, EPS) * factors
    torch.testing.assert_close(q.double(), expected, rtol=error, atol=2**-22)
    keys = reference.rms_norm(plain_cache[:, 0], weight, EPS)
    torch.testing.assert_close(cache[:, 0].double(), keys, rtol=error, atol=2**-22)
    assert torch.equal(cache[:, 1], plain_cache[:, 1])
    assert torch.equal(qkv[:, 3 * 40 :], step.qkv[:, 3 * 40 :])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
def test_where_norms_round(dtype: torch.dtype, wide: bool, device: torch.device) -> None:
    """Before a narrow weight, after a wide one, and before the rotation; equal but for ties of the sum's last bit."""
    step = new_step(1, 25, (3, 1, 40, 40), 8, dtype)
    weight = 1 + randn(5, 40) / 4 if wide else (1 + randn(5, 40) / 4).to(dtype)
    norms = HeadNorms(weight.to(device), weight.to(device), EPS)
    q, _, _ = step.run(device, step.new_cache(dtype), norms=norms)
    heads = step.qkv.view(25, -1, 40)[:, :3].float()
    normed = heads / torch.sqrt(heads.square().mean(-1, keepdim=True) + EPS)
    x = (normed * weight).to(dtype) if wide else normed.to(dtype) * weight
    cos, sin = (table[step.positions][:, None] for table in step.tables())
    expected = x * cos + torch.cat([x[..., 20:], x[..., :20]], -1) * sin
    assert float((q == expected).float().mean()) > 0.998


def needs_fp8(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("this GPU has no fp8")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rotated", [40, 24])
def test_norms_of_heads_that_are_filled_up(rotated: int, in_place: bool, device: torch.device) -> None:
    """Zeros behind a head's 40 columns change nothing, and stay."""
    step = new_step(5, 4, (3, 1, 40, rotated), 8, torch.float32)
    filled = new_step(5, 4, (3, 1, 64, rotated), 8, torch.float32)
    filled.qkv.zero_().view(4, -1, 64)[..., :40] = step.qkv.view(4, -1, 40)
    norms = HeadNorms(*(1 + randn(seed, 40).to(device) / 4 for seed in (2, 3)), EPS)
    (q, cache, _), (wide_q, wide_cache, _) = (
        each.run(device, each.new_cache(torch.float32), in_place=in_place, norms=norms) for each in (step, filled)
    )
    for found, expected in ((wide_q, q), (wide_cache, cache)):
        torch.testing.assert_close(found[..., :40], expected, rtol=1e-6, atol=1e-6)
        assert not found[..., 40:].any()


@pytest.mark.parametrize("dtype", list(UNIT))
def test_fp8_cache(dtype: torch.dtype, device: torch.device) -> None:
    """Over the head's scale, saturated. The numbers are multiples of it that fp8 has: casts need no rounding here."""
    needs_fp8(device)
    step = new_step(0, 12, (2, 3, 16, 8), 8, dtype)
    step.angles.zero_()
    step.slots[4] = -1
    generator = torch.Generator().manual_seed(3)
    scales = torch.tensor([[0.5, 1.0, 4.0], [2.0, 0.25, 1.0]])
    stored = torch.randint(-15, 16, (12, 2, 3, 16), generator=generator) * 0.125
    stored[3, :, 1] = 448.0
    heads = step.qkv.view(12, 8, 16)
    heads[:, 2:] = (stored * scales[:, :, None]).flatten(1, 2).to(dtype)
    heads[7, 3], heads[7, 5] = 1000.0, -1000.0
    stored[7, 0, 1], stored[7, 1, 0] = 448.0, -448.0
    expected = torch.zeros(BLOCKS, 2, 3, 8, 16)
    written = step.slots >= 0
    reference.write_kv(expected, stored[written, 0], stored[written, 1], step.slots[written])
    k_scale, v_scale = scales.to(device)
    _, cache, _ = step.run(device, step.new_cache(FP8), scales=KVScales(k_scale, v_scale))
    assert torch.equal(cache.float(), expected)


def test_fp8_rounds_to_nearest(device: torch.device) -> None:
    needs_fp8(device)
    step = new_step(0, 12, (2, 3, 64, 64), 8, torch.bfloat16)
    scales = torch.tensor([0.02, 0.3, 1.7], device=device)
    _, cache, _ = step.run(device, step.new_cache(FP8), scales=KVScales(scales, scales))
    values = step.qkv.view(12, 8, 64)[:, 5:].float() / scales.cpu()[:, None]
    found = cache[step.slots // 8, 1, :, step.slots % 8].float()
    torch.testing.assert_close(found, values.clamp(-448, 448), rtol=2**-4 * 1.001, atol=2**-10)


def test_nothing_to_do(device: torch.device) -> None:
    """No tokens, and none that is written: a negative position is read as the first."""
    step = new_step(0, 0, (2, 1, 16, 16), 8, torch.float32)
    _, cache, _ = step.run(device, step.new_cache(torch.float32))
    assert not cache.any()
    step = new_step(0, 0, (2, 1, 16, 16), 8, torch.float32, padding=3)
    step.qkv.fill_(1.0)
    tables = step.tables()
    step.positions.fill_(-1)
    q = torch.full((3, 2, 16), NAN, device=device)
    cache = torch.zeros(2, 2, 1, 8, 16, device=device)
    cos, sin, positions, slots = (t.to(device) for t in (*tables, step.positions, step.slots))
    cos[0], sin[0] = 0.5, 0.0
    rope_write_kv(step.qkv.to(device), cos, sin, positions, cache, slots, 2, q_out=q)
    assert bool((q == 0.5).all())
    assert not cache.any()


def test_what_is_allowed(device: torch.device) -> None:
    """What the refused launches below differ from."""
    given = arguments()
    rope_write_kv(**{name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()})


def arguments(**changes: Any) -> dict[str, Any]:
    """Of a launch that is allowed, but for the changes."""
    allowed = {
        "qkv": torch.zeros(3, 64),
        "cos": torch.zeros(9, 16),
        "sin": torch.zeros(9, 16),
        "positions": torch.zeros(3, dtype=torch.int64),
        "kv_layer": torch.zeros(2, 2, 1, 8, 16),
        "slot_mapping": torch.zeros(3, dtype=torch.int64),
        "num_heads": 2,
    }
    return allowed | changes


CACHE = torch.zeros(2, 2, 1, 8, 16)
ONES = torch.ones(16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.zeros(3, 63)}, "qkv must be"),
        ({"num_heads": 5}, "qkv must be"),
        ({"num_heads": 1}, "qkv must be"),
        ({"qkv": torch.zeros(3, 64).double()}, "qkv must be"),
        ({"qkv": torch.zeros(3, 128)[:, ::2]}, "qkv must be a matrix of .* with adjacent columns"),
        ({"qkv": torch.zeros(3, 70)[:, :64]}, "qkv must be .*, whole heads apart, is"),
        ({"cos": torch.zeros(9, 18)}, "cos must have 0 to 16"),
        ({"cos": torch.zeros(9, 15)}, "cos must have 0 to 16"),
        ({"cos": torch.zeros(9, 16).half()}, "cos must be"),
        ({"sin": torch.zeros(8, 16)}, "sin must be"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions must be"),
        ({"positions": None}, "cos must be"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int32)}, "slot_mapping must be"),
        ({"kv_layer": CACHE[0]}, "kv_layer must be"),
        ({"kv_layer": torch.zeros(2, 2, 1, 4, 16)}, "kv_layer must be"),
        ({"kv_layer": torch.zeros(2, 2, 1, 8, 12)}, "multiple of 8"),
        ({"kv_layer": torch.zeros(2, 2, 1, 8, 32)[..., ::2]}, "contiguous heads"),
        ({"kv_layer": CACHE.half()}, "kv_layer must be torch.float32"),
        ({"kv_layer": CACHE.to(FP8)}, "needs scales"),
        ({"scales": KVScales(torch.ones(1), torch.ones(1))}, "where scales are given"),
        ({"kv_layer": CACHE.to(FP8), "scales": KVScales(torch.ones(2), torch.ones(1))}, r"scales\.k must be"),
        ({"kv_layer": CACHE.to(FP8), "scales": KVScales(torch.ones(1), torch.ones(1).half())}, r"scales\.v must be"),
        ({"norms": HeadNorms(ONES[:8], ONES, EPS)}, r"norms\.q must have 16 to 16"),
        ({"norms": HeadNorms(ONES.double(), ONES, EPS)}, r"norms\.q must be"),
        ({"norms": HeadNorms(ONES, ONES.half(), EPS)}, r"norms\.k must be"),
        ({"q_out": torch.zeros(3, 32)}, "q_out must be"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_write_kv(**arguments(**changes))
