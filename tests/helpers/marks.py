"""What runs in `make test`, and what in `make test-long` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def short_and_long(values: Iterable[Any], short: Iterable[Any]) -> list[Any]:
    """Return the values for `pytest.mark.parametrize`, those that are not in `short` marked long.

    Tuples are values of several arguments. Each of `short` must be among the values, or AssertionError is raised.
    """
    values, left = list(values), list(short)
    found = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        is_short = value in left
        if is_short:
            left.remove(value)
        found.append(pytest.param(*arguments, marks=() if is_short else pytest.mark.long))
    assert not left, f"no such values: {left}"
    return found
