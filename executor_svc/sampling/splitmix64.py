"""splitmix64 in plain integers: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA'14.

The finalizer is Stafford's mix 13.
"""

from __future__ import annotations

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """Return a bijection of 64 bits: every bit of x, below 2^64, flips about half of the result's."""
    x ^= x >> 30
    x = x * MIX_1 & MASK
    x ^= x >> 27
    x = x * MIX_2 & MASK
    return x ^ (x >> 31)
