"""The simulated model: its KV cache and its logits as functions of 64-bit hashes.

A token writes a *digest* at its position: the digest that the block table reads at the previous position, plus a hash
of token and position. A digest thus depends on all tokens up to it, as the keys and values of a real model do. In
place of attention, the model sums the contributions of all positions of the context: each position's stored digest,
mixed with the position it was read from. All sums are modulo 2^64. One wrong block, copy, swap or stale position
anywhere in the context changes the sum, and with it the token. Both sums advance by one token in O(1) (`tokens.py`).
The mixer is splitmix64's finalizer (`sampling.splitmix64`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.sampling.splitmix64 import GAMMA, MIX_1, MIX_2

U64 = NDArray[np.uint64]

VERSION = 1
"""Version of all functions here that tokens depend on; part of the numerics fingerprint."""

# Arrays without dimensions: numpy takes half as long for them as for its scalars (measured).
_GAMMA, _MIX_1, _MIX_2 = np.array(GAMMA, np.uint64), np.array(MIX_1, np.uint64), np.array(MIX_2, np.uint64)
_27, _30, _31 = np.array(27, np.uint64), np.array(30, np.uint64), np.array(31, np.uint64)


def mix(x: U64) -> U64:
    """Return an elementwise bijection of 64 bits; every bit of the input flips about half of the output's bits."""
    x = x ^ (x >> _30)
    x *= _MIX_1
    x ^= x >> _27
    x *= _MIX_2
    x ^= x >> _31
    return x


def token_hashes(token_ids: IntArray, positions: IntArray, adapter_keys: U64) -> U64:
    """Return [n] the hashes that tokens add, at their positions, to the previous position's digest.

    adapter_keys: [n] from the contents of their sequences' adapters; 0: none.
    """
    return mix(mix(token_ids.astype(np.uint64) + _GAMMA + adapter_keys) + positions.astype(np.uint64) * _GAMMA)


def adapter_key(content_hash: bytes) -> int:
    """Return what an adapter's content adds to each token before it is mixed; 0 without an adapter, never with one."""
    return int.from_bytes(content_hash[:8], "little") or 1 if content_hash else 0


def position_keys(positions: IntArray) -> U64:
    """Return [n] keys that distinguish the positions that digests are read from."""
    return mix(positions.astype(np.uint64) + _GAMMA)


def contributions(digests: U64, keys: U64) -> U64:
    """Return [n] the contributions of digests, at positions with these keys, to the sum of their context."""
    return mix(digests + keys)


def logits_hashes(contexts: U64) -> U64:
    """Return [n] the hashes that stand for rows of logits; each depends on its context only."""
    return mix(contexts + _GAMMA)


def draw_hashes(logits: U64, seeds: U64, sample_indices: IntArray, drawn: BoolArray) -> U64:
    """Return [n] the hashes that choose tokens: of the logits, mixed with seed and sample index for drawn rows."""
    keys = mix(seeds + mix(sample_indices.astype(np.uint64) + _GAMMA))
    return np.where(drawn, mix(logits + keys), logits)
