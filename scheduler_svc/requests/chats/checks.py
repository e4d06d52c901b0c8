"""Checks of a chat that need no template and no JSON."""

from __future__ import annotations

from scheduler_svc.core.errors import PreconditionError, RequestRejectedError
from scheduler_svc.requests.chats.errors import ChatError
from scheduler_svc.requests.chats.fields import ChatFields, MessageFields
from scheduler_svc.requests.chats.renderer import ChatRenderer

_UNTRUSTED = (
    "the service renders no templates of requests: start it with --trust-request-chat-template, or with the template "
    "as --chat-template"
)


def check_chat(chat: ChatFields, path: str, renderer: ChatRenderer) -> None:
    """Check a chat; raises RequestRejectedError, PreconditionError."""
    if renderer.brings_template(chat):
        if not renderer.trusts_requests:
            raise PreconditionError(f"{path}.template", _UNTRUSTED)
    elif not renderer.templates:
        raise PreconditionError(path, "the tokenizer has no chat template: send text or token ids")
    if not chat.messages:
        raise RequestRejectedError(f"{path}.messages", "must hold at least one message")
    for index, message in enumerate(chat.messages):
        _check_message(message, f"{path}.messages[{index}]")
    if not chat.continues:
        return
    if chat.add_generation_prompt:
        raise RequestRejectedError(f"{path}.add_generation_prompt", "excludes continue_final_message")
    if chat.messages[-1].content is None:
        last = f"{path}.messages[{len(chat.messages) - 1}].content"
        raise RequestRejectedError(last, "must be given, since continue_final_message continues it")


def rejected(exc: ChatError, path: str) -> RequestRejectedError:
    """Return the error of a request whose chat, at `path`, cannot be rendered."""
    return RequestRejectedError(f"{path}.{exc.field}" if exc.field else path, str(exc))


def _check_message(message: MessageFields, path: str) -> None:
    if not message.role:
        raise RequestRejectedError(f"{path}.role", "must be given")
    if message.content is None and not message.tool_calls and message.reasoning_content is None:
        raise RequestRejectedError(f"{path}.content", "must be given; it may be empty")
    for index, call in enumerate(message.tool_calls):
        if not call.name:
            raise RequestRejectedError(f"{path}.tool_calls[{index}].name", "must be given")
