"""The sampler's random numbers in Triton kernels: the same bits as `sampling.noise`, which names the sources."""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.sampling import splitmix64

GOLDEN_GAMMA = tl.constexpr(splitmix64.GAMMA)
MIX_1 = tl.constexpr(splitmix64.MIX_1)
MIX_2 = tl.constexpr(splitmix64.MIX_2)
BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
SCALE = tl.constexpr(2.0**-53)


@triton.jit
def row_key(seed_low, seed_high, sample_index, position, PURPOSE: tl.constexpr):
    """Return a 64-bit key, uint64, as `sampling.noise.row_keys`; arguments are scalar int32 words."""
    seed = (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | seed_low.to(tl.uint32, bitcast=True).to(
        tl.uint64
    )
    low, high, _, _ = tl.philox(seed, position, sample_index, position * 0 + PURPOSE, position * 0)
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def uniform(key, ids):
    """Return uniform numbers in (0, 1), float32, for ids int32 with one key, as `sampling.noise.uniform` does."""
    z = key + ids.to(tl.uint64) * GOLDEN_GAMMA
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    z = z ^ (z >> 31)
    # The high 52 bits plus a half, all exact in 53 bits: the only rounding is the one to float32.
    odd = ((z >> 11) | 1).to(tl.int64)
    return tl.minimum(odd.to(tl.float32) * SCALE, BELOW_ONE)


@triton.jit
def exponential(v):
    """Return -log1p(-v) of uniform v: a standard exponential number, exact for the small values that win a race.

    log1p is log times the quotient that cancels the rounding of 1 - v (Kahan; in Goldberg, "What every computer
    scientist should know about floating-point arithmetic", 1991, theorem 4).
    """
    rest = 1.0 - v
    taken = 1.0 - rest
    small = taken == 0.0
    return tl.where(small, v, -tl.log(rest) * (v / tl.where(small, 1.0, taken)))
