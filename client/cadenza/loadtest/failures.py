"""What is said of requests that failed: how many with which code, and the first message of each code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_MOST = 300
"""Characters of a message: some servers send the whole request back."""


@dataclass(slots=True)
class Failures:
    """The failures of a run, as they come."""

    errors: dict[str, int] = field(default_factory=dict)
    """By code, how many."""
    messages: dict[str, str] = field(default_factory=dict)
    """By code, what was said of the first one of which something was said."""

    def add(self, code: str, message: str) -> None:
        """One more; an empty message says nothing."""
        self.errors[code] = self.errors.get(code, 0) + 1
        if code not in self.messages and (line := _one_line(message)):
            self.messages[code] = line


def failure_sentences(errors: Mapping[str, int], messages: Mapping[str, str], num_requests: int) -> list[str]:
    """In sentences: how many of `num_requests` failed, and why; empty if none did."""
    if not errors:
        return []
    often = sorted(errors.items(), key=lambda each: -each[1])
    codes = ", ".join(f"{code} {count:,}" for code, count in often)
    reasons = [f"{code}: {messages[code]}" for code, _ in often if code in messages]
    return [f"{sum(errors.values()):,} of {num_requests:,} requests failed: {codes}.", *reasons]


def _one_line(message: str) -> str:
    """Without what a terminal would take as orders."""
    line = " ".join("".join(each if each.isprintable() else " " for each in message).split())
    return line if len(line) <= _MOST else line[:_MOST] + "…"
