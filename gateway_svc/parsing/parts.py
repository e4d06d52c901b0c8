"""What an output consists of: pieces, as they are read, and parts, as they are answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Role(Enum):
    """What a marker means."""

    CALL = "call"
    """A call begins, or a list of calls."""
    CALL_END = "call end"
    ARGUMENTS = "arguments"
    """Within a call, as behind its name."""
    WRAPPER = "wrapper"
    """Around an answer, and none of it."""
    THOUGHT = "thought"
    THOUGHT_END = "thought end"


@dataclass(frozen=True, slots=True)
class Marker:
    """A text that separates the parts of an output."""

    role: Role
    text: str
    token_id: int | None = None
    """Its token, if it is one: then the same text in other tokens is no marker. None: it is known by its text."""
    is_special: bool = False
    """Whether its token is left out of texts with skip_special_tokens."""
    is_nothing: bool = False
    """Whether it is none of an answer's text where it stands in it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A marker in an output."""

    marker: Marker
    shown: str
    """Its text as far as the output has it: nothing for a special token that is left out."""
    num_tokens: int
    """Tokens of the output to its end."""

    @property
    def role(self) -> Role:
        """What it means."""
        return self.marker.role


Piece = str | Mark


def shown_of(piece: Piece) -> str:
    """The text of a piece, as far as the output has it."""
    return piece.shown if isinstance(piece, Mark) else piece


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str
    tokens: tuple[int, ...] = field(default=(), compare=False)
    """Indexes of the tokens that made it, where they are asked for."""


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a tool: its arguments follow."""

    index: int
    """Of the call in the output, from 0."""
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, which joined are a JSON text, as far as the output goes."""

    index: int
    text: str


Part = Thought | Content | CallBegin | CallArguments
