"""Checks chats and renders them: short ones with the model's template here, all others in child processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2

from scheduler_svc.core.errors import PreconditionError, RequestRejectedError
from scheduler_svc.requests.chats.door import RenderDoor
from scheduler_svc.requests.chats.fields import ChatError, ChatFields, ChatJob, MessageFields
from scheduler_svc.requests.chats.template import compile_template, render

INLINE_CHARS = 4096
"""A chat up to this length is rendered on the event loop, in well under 1 ms."""
RENDER_S = 10.0
"""Longest time for a chat with the model's template."""
REQUEST_RENDER_S = 2.0
"""The same with a request's own."""
_DEFAULT, _TOOL_USE = "default", "tool_use"
_NO_TEMPLATE = "the tokenizer has no chat template: send text or token ids"
_UNTRUSTED = (
    "the service renders no templates of requests: start it with --trust-request-chat-template, or with the template "
    "as --chat-template"
)


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How chats are rendered, by the service's options."""

    template: str = ""
    """In place of the tokenizer's; empty: the tokenizer's."""
    trusts_requests: bool = False
    """Whether a request may bring its own template."""


class ChatRenderer:
    """Renders chats for one tokenizer; for use on one event loop."""

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, Any], *, trusts_requests: bool = False
    ) -> None:
        """templates: the model's by name, of which "default" and "tool_use" are chosen without being named."""
        self.templates = templates
        self.trusts_requests = trusts_requests
        self._special_tokens = special_tokens
        self._compiled: dict[str, jinja2.Template] = {}
        # Two, so that chats with the model's template do not wait for a request's.
        self._of_model = RenderDoor(RENDER_S)
        self._of_requests = RenderDoor(REQUEST_RENDER_S)

    @property
    def shown_template(self) -> str:
        """The template that shows how the model writes tool calls; empty: there is none."""
        return self.templates.get(_TOOL_USE) or self.templates.get(_DEFAULT, "")

    def brings_template(self, chat: ChatFields) -> bool:
        """Whether a chat has a template of its own, and not the name of one of the model's."""
        return bool(chat.template) and chat.template not in self.templates

    def is_short(self, chat: ChatFields) -> bool:
        """Whether a chat can be rendered here."""
        return chat.num_chars <= INLINE_CHARS and not self.brings_template(chat)

    def render(self, chat: ChatFields) -> str:
        """Return a short chat as text; raises ChatError."""
        assert not self.brings_template(chat), "rendered in another process"
        source = self._source(chat)
        compiled = self._compiled.get(source)
        if compiled is None:
            compiled = self._compiled[source] = compile_template(source)
        return render(compiled, chat, self._special_tokens)

    async def render_off_loop(self, chat: ChatFields) -> str:
        """Return any chat as text; raises ChatError."""
        if self.is_short(chat):
            return self.render(chat)
        if self.brings_template(chat):
            return await self._of_requests.render(ChatJob(chat.template, "template", chat, self._special_tokens))
        return await self._of_model.render(ChatJob(self._source(chat), "", chat, self._special_tokens))

    def close(self) -> None:
        """End the child processes once the chats that wait are rendered."""
        self._of_model.close()
        self._of_requests.close()

    def _source(self, chat: ChatFields) -> str:
        """Return the model's template for a chat, chosen as transformers does; raises ChatError."""
        if chat.template in self.templates:
            return self.templates[chat.template]
        if chat.tools and _TOOL_USE in self.templates:
            return self.templates[_TOOL_USE]
        if _DEFAULT in self.templates:
            return self.templates[_DEFAULT]
        if not self.templates:
            raise ChatError("", _NO_TEMPLATE)
        names = ", ".join(sorted(self.templates))
        raise ChatError("template", f"must name one of the model's templates, {names}: none is the default")


def templates_of(value: object) -> dict[str, str]:
    """Return a tokenizer's `chat_template` by names: transformers has a text, or several by name."""
    if isinstance(value, Mapping):
        return {str(name): str(template) for name, template in value.items() if template}
    return {_DEFAULT: value} if isinstance(value, str) and value else {}


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
