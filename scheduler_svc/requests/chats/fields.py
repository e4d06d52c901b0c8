"""A chat in plain values, as received and as a child is asked to render it, and the error if it cannot be rendered.

Questions to the child are pickled, since it may trust its parent; answers are texts, since a template may have taken
the child over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

MAX_PROMPT_CHARS = 1024 * 1024
"""Limit of all texts of a prompt together, and of a rendered chat."""
_FIELD_CHARS = 32
"""What a message or a call takes beside its texts, in characters that take as long to render."""
_MAX_QUOTED_CHARS = 500
NOT_COMPILED = "the chat template does not compile"
"""So begins the error of what is no template."""
_RENDERED, _FAILED = "t", "e"


class ChatError(Exception):
    """A chat cannot be rendered; `field` is the path of the wrong field within the chat, empty for the whole of it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ChatBoundsError(ChatError):
    """A template takes too much time or memory."""


def quoted(exc: Exception) -> str:
    """The message of a template's error, which may quote the chat, or its type if there is none."""
    text = str(exc) or type(exc).__name__
    return text if len(text) <= _MAX_QUOTED_CHARS else text[: _MAX_QUOTED_CHARS - 1] + "…"


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


CallContent = Literal["given", "absent", "empty", "null"]
"""How the content stands that a message with calls does not have. given: as it came, "" or absent."""
RawArguments = Literal["text", "object", "none"]
"""How arguments stand that are no JSON object, where others are objects. object: {"arguments": text}; none: not."""


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """The forms in which a template shows a chat, as `probe` finds them; the default is what transformers passes."""

    parts: frozenset[str] = frozenset()
    """Roles whose content is a list of parts; that of all others is a text."""
    call_content: CallContent = "given"
    text_arguments: bool = False
    """Whether arguments of calls are JSON text, and not objects."""
    raw_arguments: RawArguments = "text"
    shows_system: bool = True
    """Whether a first system message is shown; else its text begins the first turn of the user."""
    merges_turns: bool = False
    """Whether turns of the user that follow each other are one."""
    short_ids: bool = False
    """Whether ids of calls are nine letters and digits."""
    named_ids: bool = False
    """Whether ids of calls are `functions.NAME:INDEX`, as Kimi K2's template shows them, in place of names."""
    joins_thought: bool = False
    """Whether text beside a thought and calls stands in the thought."""
    old_names: bool = False
    """Whether tools are `functions`, a text, beside the time as `datetime`, as firefunction's template reads them."""
    empty_tools: bool = False
    """Whether tools are an empty list, and not null, where there are none, as Hermes' own templates need them."""
    call_format: str = ""
    """The format in which calls are written into the content, where the template shows none; empty: it shows them."""
    no_tools: str = ""
    """Why tools are refused; empty: they are not."""
    no_calls: str = ""
    """Why calls in messages are refused, and tools with them."""
    unusable: str = ""
    """Why all chats are refused."""


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A chat and the template to render it with."""

    template: str
    field: str
    """The field that has the template; empty: it is the model's."""
    chat: ChatFields
    special_tokens: Mapping[str, Any]
    form: TemplateForm = TemplateForm()


def rendered(text: str) -> bytes:
    """Return the answer with a text."""
    return (_RENDERED + text).encode()


def failed(error: ChatError) -> bytes:
    """Return the answer with an error; what cannot be encoded of its message is replaced."""
    return (_FAILED + json.dumps([error.field, str(error)])).encode()


def read_answer(answer: str) -> str:
    """Return the text of an answer; raises ChatError, and ValueError for what is no answer."""
    kind, content = answer[:1], answer[1:]
    if kind == _RENDERED:
        return content
    if kind == _FAILED:
        match json.loads(content):
            case [str(field), str(message)]:
                raise ChatError(field, message)
    raise ValueError("it is no answer")
