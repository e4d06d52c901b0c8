"""What the parts of an output come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway_svc.parsing.parts import CallArguments, CallBegin, Content, Part, Thought


@dataclass(slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """What the parts of an output come to."""

    thought: str | None = None
    content: str | None = None
    calls: list[Call] = field(default_factory=list)
    num_reasoning_tokens: int = 0

    def add(self, parts: Sequence[Part]) -> None:
        """Add the next parts."""
        for part in parts:
            match part:
                case Thought(text):
                    self.thought = (self.thought or "") + text
                case Content(text):
                    self.content = (self.content or "") + text
                case CallBegin(_, name):
                    self.calls.append(Call(name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
