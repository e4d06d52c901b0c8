"""Parses numbers in option values."""

from __future__ import annotations

import math


def positive(text: str, name: str) -> float:
    """A finite number over 0; raises a ValueError that names `name`."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, not {text!r}") from None
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be over 0, not {text}")
    return number
