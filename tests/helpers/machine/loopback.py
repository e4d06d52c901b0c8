"""Addresses of the loopback that no other test has."""

from __future__ import annotations

import itertools
import os

_NUMBERS = itertools.count(1)


def new_address() -> str:
    """One more."""
    own, number = os.getpid(), next(_NUMBERS)
    return f"127.{1 + own % 250}.{1 + own // 250 % 250}.{number}"
