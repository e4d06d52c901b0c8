"""What the process of one body answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_CPU_S = 10
"""Of one body's process. 8 MB of JSON take 0.3 s."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a body: a value, the fields of an ApiError, or the traceback of a bug."""

    value: Any = None
    error: tuple[int, str, str | None, str | None] | None = None
    """Status, message, param, code."""
    bug: str = ""
