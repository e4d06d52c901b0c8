"""A chat as received, in plain values."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PROMPT_CHARS = 1024 * 1024
"""Limit of all texts of a prompt together, and of a rendered chat."""
_FIELD_CHARS = 32
"""What a message or a call takes beside its texts, in characters that take as long to render."""


@dataclass(frozen=True, slots=True)
class ToolCallFields:
    """A call of a function; its arguments are JSON, or empty."""

    name: str
    arguments: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class MessageFields:
    """One turn; None: the field was not given."""

    role: str
    content: str | None = None
    tool_calls: tuple[ToolCallFields, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning_content: str | None = None

    @property
    def num_chars(self) -> int:
        """Characters to render, and a number for each field."""
        calls = sum(len(each.arguments) + _FIELD_CHARS for each in self.tool_calls)
        return len(self.content or "") + len(self.reasoning_content or "") + calls + _FIELD_CHARS


@dataclass(frozen=True, slots=True)
class ChatFields:
    """A chat; tools, documents and template_kwargs are JSON, as received."""

    messages: tuple[MessageFields, ...]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    template_kwargs: str = ""
    template: str = ""

    @property
    def continues(self) -> bool:
        """Whether the last message stays open."""
        return bool(self.continue_final_message)

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the header of the assistant's turn ends the prompt: unless the last message is continued."""
        return not self.continues if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def num_chars(self) -> int:
        """Characters to render, and a number for each field."""
        objects = sum(len(each) + _FIELD_CHARS for each in (*self.tools, *self.documents))
        return sum(each.num_chars for each in self.messages) + objects + len(self.template_kwargs)
