"""What a rendering child is asked, and the form of its answers.

Questions are pickled, since the child may trust its parent; answers are texts, since a template may have taken the
child over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler_svc.requests.chats.errors import ChatError
from scheduler_svc.requests.chats.fields import ChatFields

_RENDERED, _FAILED = "t", "e"


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A chat and the template to render it with."""

    template: str
    field: str
    """The field that has the template; empty: it is the model's."""
    chat: ChatFields
    special_tokens: Mapping[str, Any]


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
