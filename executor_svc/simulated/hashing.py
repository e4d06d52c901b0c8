"""The simulated model: what tokens leave in the KV cache, and what its logits are, as functions of 64-bit hashes.

A token at a position leaves a *digest* there: the digest that the block table reads at the position before, plus a hash
of token and position. So a digest stands for all tokens up to it, as the keys and values of a real model do. What
attention is for a real model is the sum of what each position of the context contributes: its digest, as found, mixed
with where it was read. All sums are modulo 2^64. One wrong block, copy, swap or stale position anywhere in the context
gives another sum, and so another token; and both sums go on from one token to the next in O(1) (`tokens.py`).
The mixer is splitmix64's finalizer (Steele, Lea, Flood, OOPSLA'14; Stafford's mix 13).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from executor_svc.plan.arrays import BoolArray, IntArray

U64 = NDArray[np.uint64]

VERSION = 1
"""Of everything here that a token depends on; enters the numerics fingerprint."""
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

_GAMMA, _MIX_1, _MIX_2 = np.uint64(GAMMA), np.uint64(MIX_1), np.uint64(MIX_2)


def mix(x: U64) -> U64:
    """A bijection of 64 bits, elementwise, in which every bit of the input moves about half of the output's."""
    x = x ^ (x >> np.uint64(30))
    x *= _MIX_1
    x ^= x >> np.uint64(27)
    x *= _MIX_2
    x ^= x >> np.uint64(31)
    return x


def token_hashes(token_ids: IntArray, positions: IntArray) -> U64:
    """[n] what tokens add at their positions to the digest of the position before."""
    return mix(mix(token_ids.astype(np.uint64) + _GAMMA) + positions.astype(np.uint64) * _GAMMA)


def position_keys(positions: IntArray) -> U64:
    """[n] what tells one place of reading from another."""
    return mix(positions.astype(np.uint64) + _GAMMA)


def contributions(digests: U64, keys: U64) -> U64:
    """[n] what digests found at positions with these keys add to the sum of their context."""
    return mix(digests + keys)


def logits_hashes(contexts: U64) -> U64:
    """[n] the hash that stands for a row of logits: of its context alone."""
    return mix(contexts + _GAMMA)


def draw_hashes(logits: U64, seeds: U64, sample_indices: IntArray, drawn: BoolArray) -> U64:
    """[n] the hash that a row's token is taken by: that of its logits, where drawn with seed and sample index."""
    keys = mix(seeds + mix(sample_indices.astype(np.uint64) + _GAMMA))
    return np.where(drawn, mix(logits + keys), logits)
