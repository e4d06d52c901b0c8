"""Failed requests: counts by error code, and the first message of each code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_MOST = 300
"""Most characters of a message: some servers send the whole request back."""


@dataclass(slots=True)
class Failures:
    """The failures of a run, in the order in which they happen."""

    errors: dict[str, int] = field(default_factory=dict)
    """Number of failures by code."""
    messages: dict[str, str] = field(default_factory=dict)
    """The first message by code, if there was any."""

    def add(self, code: str, message: str) -> None:
        """Add a failure; an empty message is not kept."""
        self.errors[code] = self.errors.get(code, 0) + 1
        if code not in self.messages and (line := _one_line(message)):
            self.messages[code] = line


def failure_sentences(errors: Mapping[str, int], messages: Mapping[str, str], num_requests: int) -> list[str]:
    """Sentences: how many of `num_requests` failed, and why; empty if none did."""
    if not errors:
        return []
    often = sorted(errors.items(), key=lambda each: -each[1])
    codes = ", ".join(f"{code} {count:,}" for code, count in often)
    reasons = [f"{code}: {messages[code]}" for code, _ in often if code in messages]
    return [f"{sum(errors.values()):,} of {num_requests:,} requests failed: {codes}.", *reasons]


def _one_line(message: str) -> str:
    """The message on one line, without characters that control a terminal."""
    line = " ".join("".join(each if each.isprintable() else " " for each in message).split())
    return line if len(line) <= _MOST else line[:_MOST] + "…"
