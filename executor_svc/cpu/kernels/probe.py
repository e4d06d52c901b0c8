"""Checks on this machine that a row's bits do not depend on its batch.

The kernels' sources guarantee this; the probe tests their machine code.
"""

from __future__ import annotations

import torch

from executor_svc.device.kernels import Linear

_ROW_COUNTS = (1, 2, 3, 7, 12, 16, 25)
_MAX_ROWS = 97
_MOST_SMALL = 12
"""Every number of rows up to this one is tried, if a sequence with drafts may bring as many."""


def rows_with_drafts(max_drafts: int) -> tuple[int, ...]:
    """Return the numbers of rows that one sequence brings to a step with drafts, the small ones and the greatest."""
    return (*range(1, min(1 + max_drafts, _MOST_SMALL) + 1), 1 + max_drafts) if max_drafts else ()


def probe_linear(linear: Linear, dtype: torch.dtype, max_rows: int, more: tuple[int, ...] = ()) -> str | None:
    """Compare rows in small batches, at different places, with the same rows in a large batch.

    more: numbers of rows to try beside those that are always tried. Returns an error message, or None if all rows are
    equal.
    """
    generator = torch.Generator().manual_seed(0)
    most = min(max_rows, _MAX_ROWS)
    x = torch.randn(most, linear.in_features, generator=generator).to(dtype)
    expected = linear(x)
    for count in sorted(count for count in {*_ROW_COUNTS, *more} if count < most):
        for start in (0, most - count):
            if not torch.equal(linear(x[start : start + count]), expected[start : start + count]):
                return f"a row has other bits among {count} rows than among {most}"
    return None
