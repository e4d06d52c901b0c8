"""Operations over rows of logits, for rows of anything: other ranks than 0 have no logits, and compute all the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_svc.sampling.row_math import top_ids

BITS = {"signalling": 0x7F800001, "quiet": 0x7FC00000, "infinite": 0x7F800000, "below all": -0x00800000}


@pytest.mark.parametrize("bits", BITS.values(), ids=BITS.keys())
def test_the_largest_of_any_bits_are_found_without_a_warning(bits: int) -> None:
    """Warnings are errors here; a row with NaN gives some ids."""
    rows = np.linspace(-3, 3, 200, dtype=np.float32).reshape(2, 100)
    rows.view(np.int32)[0, ::7] = bits
    found = top_ids(torch.from_numpy(rows), 5)
    assert found.shape == (2, 5)
    assert ((found >= 0) & (found < 100)).all()
    assert found[1].tolist() == [99, 98, 97, 96, 95]
    if np.isinf(np.int32(bits).view(np.float32)):
        wanted = [0, 7, 14, 21, 28] if bits > 0 else [99, 97, 96, 95, 94]
        assert found[0].tolist() == wanted


def test_zeros_of_either_sign_are_equal() -> None:
    rows = np.full((1, 40), -1, np.float32)
    rows[0, [3, 20]], rows[0, [9, 30]] = 0.0, -0.0
    assert top_ids(torch.from_numpy(rows), 4).tolist() == [[3, 9, 20, 30]]
