"""Addresses of the loopback that no other test has.

A service that is restarted at its port needs one: while it is down, another test's service may get a port of 127.0.0.1.
"""

from __future__ import annotations

import itertools
import os

_NUMBERS = itertools.count()


def new_address() -> str:
    """One more; after 254 of this process the first one again."""
    own, number = os.getpid(), next(_NUMBERS)
    return f"127.{1 + own % 250}.{1 + own // 250 % 250}.{1 + number % 254}"
