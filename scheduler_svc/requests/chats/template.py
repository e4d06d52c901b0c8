"""Chat templates: Jinja in its sandbox, with what transformers gives to templates, and within bounds.

This module and those that it imports load quickly: a child process renders with them.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from scheduler_svc.requests.chats.efforts import near_efforts
from scheduler_svc.requests.chats.fields import (
    MAX_PROMPT_CHARS,
    NOT_COMPILED,
    ChatError,
    ChatFields,
    TemplateForm,
    quoted,
)
from scheduler_svc.requests.chats.messages import Placed, arranged, is_system, later_system_texts
from scheduler_svc.requests.chats.tools import full_tools
from scheduler_svc.requests.chats.variables import template_variables

_OPEN_END = "CADENZA_OPEN_END "
"""Ends a message that is to be continued; the text is cut there. Without its space a template has trimmed the text."""
_MARK = "CADENZASYSTEM"
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
"""Those of all APIs; others are a template's own."""
_OF_LISTS = ("append", "pop")
_FORM = TemplateForm()


def compile_template(source: str, field: str = "") -> jinja2.Template:
    """Compile a template; raises ChatError of this field if it is no template."""
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatError(field, f"{NOT_COMPILED}: line {error.lineno}: {quoted(error)}") from None
    except MemoryError:
        raise ChatError(field, f"{NOT_COMPILED}: it takes too much memory") from None
    except Exception as error:  # as of a constant expression that is computed, or of a nesting that Python refuses
        raise ChatError(field, f"{NOT_COMPILED}: {quoted(error)}") from None


def render(
    template: jinja2.Template, chat: ChatFields, special_tokens: Mapping[str, Any], form: TemplateForm = _FORM
) -> str:
    """Return a chat as text, with messages in this form; raises ChatError.

    Tools that a template refuses are shown once more as it may expect them, and an effort that it refuses is the
    nearest that it knows.
    """
    try:
        return _rendered(template, chat, special_tokens, form)
    except ChatError as error:
        full = full_tools(chat.tools)
        chats = [chat, replace(chat, tools=full)] if full != chat.tools else [chat]
        others = [replace(each, template_kwargs=near) for near in near_efforts(chat.template_kwargs) for each in chats]
        for other in [*chats[1:], *others]:
            with suppress(ChatError):
                return _rendered(template, other, special_tokens, form)
        raise error from None


def _rendered(
    template: jinja2.Template, chat: ChatFields, special_tokens: Mapping[str, Any], form: TemplateForm
) -> str:
    order = arranged(chat.messages, form)
    later = later_system_texts(chat)
    system = [index for index, each in enumerate(chat.messages) if is_system(each)]
    folds = bool(later) and not _shows_marks(template, chat, special_tokens, form, system, folds=False)
    if folds:
        if not _shows_marks(template, chat, special_tokens, form, system, folds=True):
            message = "the chat template shows no system message here, nor its text in a turn of the user"
            raise ChatError(f"messages[{later[0]}].role", message)
        order = arranged(chat.messages, form, folds=True)
    text = _render(template, chat, template_variables(chat, special_tokens, form, _open(chat, order)))
    of_roles: dict[str, list[int]] = {}
    for index, each in enumerate(chat.messages):
        if each.role not in _ROLES:
            of_roles.setdefault(each.role, []).append(index)
    for role, others in of_roles.items():
        if not _shows_marks(template, chat, special_tokens, form, others, folds=folds):
            message = f"the chat template shows no message of the role {role[:64]!a} here"
            raise ChatError(f"messages[{others[0]}].role", message)
    return text


def _shows_marks(
    template: jinja2.Template,
    chat: ChatFields,
    special_tokens: Mapping[str, Any],
    form: TemplateForm,
    indexes: Sequence[int],
    *,
    folds: bool,
) -> bool:
    """Whether marks in place of the texts of these messages are rendered; raises ChatError if `folds`."""
    marks = {index: f"{_MARK}{index}E" for index in indexes if chat.messages[index].content}
    marked = [
        replace(each, content=marks[index]) if index in marks else each for index, each in enumerate(chat.messages)
    ]
    open_end = replace(chat, continue_final_message=False, add_generation_prompt=chat.adds_generation_prompt)
    try:
        order = arranged(marked, form, folds=folds)
        text = _render(template, open_end, template_variables(chat, special_tokens, form, order))
    except ChatError:
        if folds:
            raise
        return False
    return all(mark in text for mark in marks.values())


def _open(chat: ChatFields, order: list[Placed]) -> list[Placed]:
    """Return the messages, of which the last one ends with a mark if it is to be continued."""
    if not chat.continues:
        return order
    index, last = order[-1]
    return [*order[:-1], (index, replace(last, content=(last.content or "") + _OPEN_END))]


def _render(template: jinja2.Template, chat: ChatFields, variables: Mapping[str, Any]) -> str:
    parts: list[str] = []
    num_chars = 0
    try:
        for part in template.generate(variables):
            parts.append(part)
            num_chars += len(part)
            if num_chars > MAX_PROMPT_CHARS:
                raise ChatError("", f"the rendered chat has over {MAX_PROMPT_CHARS} characters")
    except ChatError:
        raise
    except MemoryError:
        raise ChatError("", "the chat takes too much memory to render") from None
    except Exception as error:  # a template may raise anything
        raise ChatError("", f"the chat template refuses this chat: {quoted(error)}") from None
    text = "".join(parts)
    if chat.continues:
        text = _cut(text, chat.messages[-1].content or "")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ChatError("", "the rendered chat holds a lone surrogate, which is no character") from None
    return text


def _cut(text: str, content: str) -> str:
    """Return a rendered chat up to the end of its last message, whose text is `content`."""
    at = text.rfind(_OPEN_END.strip())
    if at < 0 or content.strip() not in text[:at]:
        raise ChatError("", "the chat template changes the last message or leaves it out, so it cannot be continued")
    return text[:at] if text.startswith(_OPEN_END, at) else text[:at].rstrip()


@functools.cache
def _environment() -> jinja2.Environment:
    """Return the environment that transformers documents for templates."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace)
    return environment


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox; but a template's own lists may grow, as those of Kimi K2 do."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute."""
        return (type(obj) is list and attr in _OF_LISTS) or super().is_safe_attribute(obj, attr, value)


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}, which marks what a model is trained on: here it only has a scope of its own."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the block as a scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, but no template stores names in it that mean something to Python."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace takes no name with an underscore at its start: {name}")
        super().__setitem__(name, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Jinja's filter, but without HTML's escapes."""
    if isinstance(value, Iterator):  # as of the filter `map`
        value = list(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
