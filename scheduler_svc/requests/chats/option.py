"""The option --chat-template."""

from __future__ import annotations

from pathlib import Path

from scheduler_svc.requests.chats.errors import ChatError
from scheduler_svc.requests.chats.template import compile_template


class ChatTemplateOptionError(Exception):
    """--chat-template is no template; the message says why."""


def read_template(value: str) -> str:
    """Return the template that a file holds, or that the value is; raises ChatTemplateOptionError."""
    try:
        text = Path(value).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ChatTemplateOptionError(f"the file {value!r} is no text") from None
    except (OSError, ValueError) as error:
        if not any(sign in value for sign in ("{{", "{%", "\n")):
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ChatTemplateOptionError(f"{value!r} is no template, and no file: {reason}") from None
        text = value
    try:
        compile_template(text)
    except ChatError as error:
        raise ChatTemplateOptionError(str(error)) from None
    return text
