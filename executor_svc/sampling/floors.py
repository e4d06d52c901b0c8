"""Floors: the least scaled logit, log(p / p of the most likely token) under temperature, that a draw keeps.

A parameter that drops what is too unlikely is a floor. A row with several of them keeps what all of them keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor_svc.plan.arrays import FloatArray, IntArray


def row_floors(logits: Tensor, rows: IntArray, peak: Tensor, numbers: Mapping[str, Any]) -> Tensor | None:
    """[n, 1] float32, at most 0, the floors of n rows of logits [L, vocab] float32; None if no row has one.

    rows: [n] which of the L; peak: [n, 1] their largest logits; numbers: [n] columns of the rows by name.
    """
    floors: FloatArray = numbers["log_min_p"]
    if not (floors > -np.inf).any():
        return None
    return torch.from_numpy(floors[:, None]).to(logits.device)
