"""Numbers in what users write."""

from __future__ import annotations

import math


def positive(text: str, name: str) -> float:
    """A number over 0 and not infinite; raises ValueError saying what of `name` is wrong."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, not {text!r}") from None
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be over 0, not {text}")
    return number
