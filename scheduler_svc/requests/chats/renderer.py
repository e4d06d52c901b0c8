"""Checks chats and renders them in child processes, each template in the form that it shows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from scheduler_svc.core.errors import PreconditionError, RequestRejectedError
from scheduler_svc.requests.chats.door import RenderDoor, finished
from scheduler_svc.requests.chats.examples import example_chats
from scheduler_svc.requests.chats.fields import (
    NOT_COMPILED,
    ChatError,
    ChatFields,
    ChatJob,
    MessageFields,
    TemplateForm,
)
from scheduler_svc.requests.chats.forms import ContentFormat, probe

_LOG = logging.getLogger(__name__)
SHORT_CHARS = 4096
"""A chat up to this length is rendered in well under 1 ms, and does not wait for longer ones."""
RENDER_S = 2.0
"""Longest time for a chat."""
_NUM_FORMS = 64
"""Of templates of requests, which are kept."""
_DEFAULT, _TOOL_USE = "default", "tool_use"
_NO_TEMPLATE = "the tokenizer has no chat template: send text or token ids, or start the service with --chat-template"
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
    content_format: ContentFormat = "auto"


class ChatRenderer:
    """Renders chats for one tokenizer; for use on one event loop."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, Any],
        *,
        trusts_requests: bool = False,
        content_format: ContentFormat = "auto",
    ) -> None:
        """templates: the model's by name, of which "default" and "tool_use" are chosen without being named."""
        self.templates = templates
        self.trusts_requests = trusts_requests
        self._content_format: ContentFormat = content_format
        self._special_tokens = special_tokens
        self._forms: dict[str, TemplateForm] = {}
        """Of the model's templates."""
        self.examples: dict[str, str] | None = None
        """Small chats as the template that shows calls shows them, by what they have; None before `prepare`."""
        self._forms_of_requests: dict[str, TemplateForm] = {}
        """The last used last."""
        # Three, so that nobody waits for another one's long chat, or template.
        self._of_short = RenderDoor(RENDER_S)
        self._of_long = RenderDoor(RENDER_S)
        self._of_requests = RenderDoor(RENDER_S)

    @property
    def shown_template(self) -> str:
        """The template that shows how the model writes tool calls; empty: there is none."""
        return self.templates.get(_TOOL_USE) or self.templates.get(_DEFAULT, "")

    def brings_template(self, chat: ChatFields) -> bool:
        """Whether a chat has a template of its own, and not the name of one of the model's."""
        return bool(chat.template) and chat.template not in self.templates

    def prepare(self) -> None:
        """Find the forms of the model's templates, which the first chats would wait for; blocks for some 0.2 s."""
        finished(self._prepare())

    async def _prepare(self) -> None:
        for name, source in self.templates.items():
            _log_form(name, await self._form(source, ""))
        if self.shown_template:
            self.examples = await self._examples(self.shown_template)

    async def _examples(self, source: str) -> dict[str, str]:
        form, found = await self._form(source, ""), dict[str, str]()
        for name, chat in example_chats():
            found[name] = ""
            with suppress(ChatError):
                _check_form(chat, form, "")
                found[name] = await self._of_short.render(ChatJob(source, "", chat, self._special_tokens, form))
        return found

    async def render(self, chat: ChatFields) -> str:
        """Return a chat as text; raises ChatError."""
        if self.brings_template(chat):
            source, field, door = chat.template, "template", self._of_requests
        else:
            source, field = await self._source(chat), ""
            door = self._of_short if chat.num_chars <= SHORT_CHARS else self._of_long
        form = await self._form(source, field)
        _check_form(chat, form, field)
        return await door.render(ChatJob(source, field, chat, self._special_tokens, form))

    async def _form(self, source: str, field: str) -> TemplateForm:
        """Return the form of a template, which is found where it is not known."""
        forms, door = (self._forms_of_requests, self._of_requests) if field else (self._forms, self._of_short)
        form = forms.pop(source, None)
        if form is None:
            form = await self._probed(source, field, door)
        if form.unusable and not form.unusable.startswith(NOT_COMPILED):
            return form  # it took too long, as it may have on a busy machine
        forms[source] = form
        if field and len(forms) > _NUM_FORMS:
            del forms[next(iter(forms))]
        return form

    async def _probed(self, source: str, field: str, door: RenderDoor) -> TemplateForm:
        search = probe(source, field, self._special_tokens, self._content_format)
        answer: str | ChatError | None = None
        try:
            while True:
                job = next(search) if answer is None else search.send(answer)
                try:
                    answer = await door.render(job)
                except ChatError as error:
                    answer = error
        except StopIteration as end:
            form: TemplateForm = end.value
            return form

    def close(self) -> None:
        """End the child processes once the chats that wait are rendered."""
        self._of_short.close()
        self._of_long.close()
        self._of_requests.close()

    async def _source(self, chat: ChatFields) -> str:
        """Return the model's template for a chat, chosen as transformers does; raises ChatError.

        But calls without tools have that for tools, where the default one would leave them out.
        """
        if chat.template in self.templates:
            return self.templates[chat.template]
        if chat.tools and _TOOL_USE in self.templates:
            return self.templates[_TOOL_USE]
        if _DEFAULT in self.templates:
            has_calls = _TOOL_USE in self.templates and any(each.tool_calls for each in chat.messages)
            if has_calls and (await self._form(self.templates[_DEFAULT], "")).no_calls:
                return self.templates[_TOOL_USE]
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
        raise PreconditionError(path, _NO_TEMPLATE)
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


def _log_form(name: str, form: TemplateForm) -> None:
    """Say what differs from what transformers passes, and what is refused."""
    differences = {each: getattr(form, each) for each in TemplateForm.__dataclass_fields__}
    plain = TemplateForm()
    shown = ", ".join(
        f"{each}: {', '.join(sorted(value)) if isinstance(value, frozenset) else value}"
        for each, value in differences.items()
        if value != getattr(plain, each)
    )
    if form.unusable:
        _LOG.warning("the chat template %r cannot be used, and chats are refused: %s", name, form.unusable)
    elif shown:
        _LOG.info("the chat template %r is given chats in the form that it shows: %s", name, shown)


def _check_form(chat: ChatFields, form: TemplateForm, field: str) -> None:
    """Raise ChatError for what a template does not show in any form."""
    if form.unusable:
        raise ChatError(field, form.unusable)
    if chat.tools and (form.no_tools or form.no_calls):
        raise ChatError("tools", form.no_tools or form.no_calls)
    if not form.no_calls:
        return
    for index, message in enumerate(chat.messages):
        if message.tool_calls:
            raise ChatError(f"messages[{index}].tool_calls", form.no_calls)


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
