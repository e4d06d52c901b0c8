"""The most likely token that a mask allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.sampling.masks import best_allowed, num_mask_words


@given(
    st.integers(1, 20_000),
    st.sampled_from([0.0, 0.0005, 0.05, 0.5, 0.99, 1.0]),
    st.sampled_from([3, 1000, 10**6]),
    st.integers(0, 2**32 - 1),
)
def test_it_is_the_first_of_the_largest(vocab: int, share: float, num_values: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Few values: many ties. Some tokens are ruled out already.
    x = rng.integers(0, num_values, vocab).astype(np.float32)
    x[rng.random(vocab) < 0.1] = -np.inf
    allowed = rng.random(vocab) < share
    words = np.zeros(num_mask_words(vocab), np.uint32)
    np.bitwise_or.at(
        words, np.flatnonzero(allowed) // 32, np.uint32(1) << (np.flatnonzero(allowed) % 32).astype(np.uint32)
    )
    before, among = x.copy(), np.where(allowed, x, -np.inf)
    expected = int(among.argmax()) if np.isfinite(among).any() else -1
    assert best_allowed(x, words) == expected
    assert (x == before).all()


@pytest.mark.parametrize("vocab", [40, 20_000])
def test_nothing_is_left(vocab: int) -> None:
    x = np.full(vocab, -np.inf, np.float32)
    assert best_allowed(x, np.full(num_mask_words(vocab), 2**32 - 1, np.uint32)) == -1
