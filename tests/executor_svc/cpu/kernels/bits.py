"""Comparison to the bit. For tests only."""

from __future__ import annotations

import torch
from torch import Tensor


def equal_bits(left: Tensor, right: Tensor) -> bool:
    """Compare as integers, so that NaN equals NaN and 0 is not -0."""
    as_ints = torch.int32 if left.dtype == torch.float32 else torch.int16
    return left.shape == right.shape and torch.equal(left.contiguous().view(as_ints), right.contiguous().view(as_ints))
