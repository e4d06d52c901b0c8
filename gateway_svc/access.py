"""What the live page may do for whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PageRights:
    """As whoever started the gateway gives them."""

    token: str = field(repr=False)
    """Whoever shows it sees all requests, and acts."""
    kill: Callable[[str], None] | None = None
    """Kills the executor at an address; None: nobody here can."""
