"""The option --chat-template: a file, or the template itself."""

from __future__ import annotations

from pathlib import Path

from scheduler_svc.requests.chats.door import RenderDoor, finished
from scheduler_svc.requests.chats.fields import (
    NOT_COMPILED,
    ChatBoundsError,
    ChatError,
    ChatFields,
    ChatJob,
    MessageFields,
)
from scheduler_svc.requests.chats.renderer import RENDER_S

_CHAT = ChatFields((MessageFields("user", "Hello"),))


class ChatTemplateOptionError(Exception):
    """--chat-template is no template; the message says why."""


def read_template(value: str) -> str:
    """Return the template that a file holds, or that the value is; raises ChatTemplateOptionError.

    A child process compiles it, as it may do what it likes then; blocks for some 0.1 s.
    """
    try:
        text = Path(value).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ChatTemplateOptionError(f"the file {value!r} is no text") from None
    except (OSError, ValueError) as error:
        if not any(sign in value for sign in ("{{", "{%", "\n")):
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ChatTemplateOptionError(f"{value!r} is no template, and no file: {reason}") from None
        text = value
    finished(_check(text))
    return text


async def _check(template: str) -> None:
    door = RenderDoor(RENDER_S)
    try:
        await door.render(ChatJob(template, "", _CHAT, {}))
    except ChatError as error:
        if str(error).startswith(NOT_COMPILED) or isinstance(error, ChatBoundsError):
            raise ChatTemplateOptionError(str(error)) from None
    finally:
        door.close()
