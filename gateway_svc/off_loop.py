"""Work for long messages in threads, so that it does not hold up the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_LONG_BYTES = 64 * 1024
"""1 MB of token ids takes 20 ms to parse, and a chat of it several times as long."""


async def off_loop(num_bytes: int, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Return what `work` makes of a message of this size: in a thread for a long one."""
    if num_bytes > _LONG_BYTES:
        return await asyncio.to_thread(work, *arguments, **named)
    return work(*arguments, **named)
