"""Messages in the form that a template shows, and in an order in which it shows all of their texts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cadenza_common.call_formats.catalog import BY_NAME
from cadenza_common.call_formats.writing import written_calls
from scheduler_svc.requests.chats.fields import ChatError, ChatFields, MessageFields, TemplateForm, ToolCallFields
from scheduler_svc.requests.chats.json_objects import MAX_DEPTH, is_deeper, refuse_constant

_SYSTEM = ("system", "developer")
_BETWEEN = "\n\n"
"""Texts that become one."""
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
Placed = tuple[int, MessageFields]
"""A message, and its index in the chat."""


def is_system(message: MessageFields) -> bool:
    """Return whether a message is the system's, also by its newer name."""
    return message.role in _SYSTEM


def later_system_texts(chat: ChatFields) -> list[int]:
    """Return the indexes of system messages behind a message of another role: few templates show these."""
    behind = len(_leading(list(enumerate(chat.messages))))
    return [index for index, each in enumerate(chat.messages) if index >= behind and is_system(each)]


def arranged(messages: Sequence[MessageFields], form: TemplateForm, *, folds: bool = False) -> list[Placed]:
    """Return the messages with one system message at most at their start.

    folds: the text of each later one stands in a turn of the user, as that of the first where none is shown.
    """
    placed = _in_order(messages, form, folds=folds)
    return _merged(placed) if form.merges_turns else placed


def _in_order(messages: Sequence[MessageFields], form: TemplateForm, *, folds: bool) -> list[Placed]:
    placed = list(enumerate(messages))
    head = _leading(placed)
    rest = [(index, _as_system(each)) for index, each in placed[len(head) :]]
    if head:
        texts = [each.content for _, each in head if each.content]
        first = (head[0][0], replace(_as_system(head[0][1]), content=_BETWEEN.join(texts)))
        if form.shows_system:
            return [first, *(_folded(rest) if folds else rest)]
        rest = [first, *rest] if folds else [*_folded([first, *_up_to_user(rest)]), *rest[len(_up_to_user(rest)) :]]
    return _folded(rest) if folds else rest


def _leading(placed: list[Placed]) -> list[Placed]:
    end = next((at for at, (_, each) in enumerate(placed) if not is_system(each)), len(placed))
    return placed[:end]


def _as_system(message: MessageFields) -> MessageFields:
    return replace(message, role="system") if is_system(message) else message


def _up_to_user(placed: list[Placed]) -> list[Placed]:
    """Return the messages to the first that may take a text in."""
    end = next((at for at, (_, each) in enumerate(placed) if each.role in ("user", "assistant")), len(placed))
    return placed[: end + 1]


def _folded(placed: list[Placed]) -> list[Placed]:
    """Return the messages with texts of the system in turns of the user: in the next one, or else in the last one."""
    made: list[Placed] = []
    waiting: list[Placed] = []
    for index, message in placed:
        if message.role == "system":
            waiting.append((index, message))
        elif message.role == "user":
            texts = [each.content for _, each in waiting if each.content]
            made.append((index, replace(message, content=_BETWEEN.join([*texts, message.content or ""]))))
            waiting = []
        else:
            if message.role == "assistant":  # results of tools stand directly behind their calls
                _put_last(made, waiting)
                waiting = []
            made.append((index, message))
    _put_last(made, waiting)
    return made


def _put_last(made: list[Placed], waiting: list[Placed]) -> None:
    """Add texts of the system to a turn of the user that ends a chat, or as one."""
    texts = [each.content for _, each in waiting if each.content]
    if not texts:
        return
    if made and made[-1][1].role == "user":
        index, last = made.pop()
        texts = [last.content or "", *texts]
        made.append((index, replace(last, content=_BETWEEN.join(texts))))
    else:
        made.append((waiting[0][0], MessageFields("user", _BETWEEN.join(texts))))


def _merged(placed: list[Placed]) -> list[Placed]:
    """Return the messages with turns of the user that follow each other as one."""
    made: list[Placed] = []
    for index, message in placed:
        before = made[-1][1] if made else None
        if before is not None and before.role == message.role == "user" and before.name == message.name:
            texts = [each for each in (before.content, message.content) if each]
            made[-1] = made[-1][0], replace(message, content=_BETWEEN.join(texts))
        else:
            made.append((index, message))
    return made


def in_form(placed: Sequence[Placed], form: TemplateForm) -> list[dict[str, Any]]:
    """Return messages as a template reads them; raises ChatError."""
    if form.named_ids:
        placed = _with_named_ids(placed)
    return [_message(each, f"messages[{index}]", form) for index, each in placed]


def _with_named_ids(placed: Sequence[Placed]) -> list[Placed]:
    """Return messages whose calls have their names as ids, and the number of each in the chat, and their results."""
    made: list[Placed] = []
    ids: dict[str, str] = {}
    number = 0
    for index, message in placed:
        calls = []
        for call in message.tool_calls:
            name = call.id if call.id.startswith("functions.") else f"functions.{call.name}:{number}"
            ids[call.id] = name
            calls.append(replace(call, id=name))
            number += 1
        known = ids.get(message.tool_call_id, message.tool_call_id)
        made.append((index, replace(message, tool_calls=tuple(calls), tool_call_id=known)))
    return made


def _message(message: MessageFields, path: str, form: TemplateForm) -> dict[str, Any]:
    """Return a message in OpenAI's form, without the fields that it does not have.

    So transformers gives them to templates: many ask whether there are `tool_calls`, and write None as "None".
    """
    if form.joins_thought and message.tool_calls and message.content and message.reasoning_content:
        thought = _BETWEEN.join((message.reasoning_content, message.content))
        message = replace(message, content=None, reasoning_content=thought)
    if form.call_format and message.tool_calls:
        message = replace(message, content=(message.content or "") + _as_text(message, form), tool_calls=())
    given: dict[str, Any] = {"role": message.role}
    content = message.content
    if message.tool_calls and not content:
        if form.call_content == "null":
            given["content"] = None
        content = {"given": content, "empty": ""}.get(form.call_content)
    elif content is None:  # a thought alone: templates read the content of each message
        content = ""
    if content is not None:
        given["content"] = [{"type": "text", "text": content}] if message.role in form.parts else content
    if message.reasoning_content is not None:
        # The second name is that of gpt-oss.
        given["reasoning_content"] = given["thinking"] = message.reasoning_content
    if message.tool_calls:
        given["tool_calls"] = [
            _tool_call(each, f"{path}.tool_calls[{index}]", form) for index, each in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        given["tool_call_id"] = _id(message.tool_call_id, form)
    if message.name:
        given["name"] = message.name
    return given


def _as_text(message: MessageFields, form: TemplateForm) -> str:
    """Return the calls of a message as the model writes them; raises ChatError."""
    syntax = BY_NAME[form.call_format]
    calls = []
    for index, each in enumerate(message.tool_calls):
        arguments = _arguments(each.arguments, f"tool_calls[{index}].arguments", form)
        calls.append((each.name, arguments if isinstance(arguments, dict) else {"arguments": arguments}))
    return written_calls(syntax.ways[syntax.written or 0], calls)


def _id(text: str, form: TemplateForm) -> str:
    """Return the id of a call, of nine letters and digits where the template demands it: of equal ids, an equal one."""
    if not form.short_ids or _SHORT_ID.fullmatch(text):
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _tool_call(call: ToolCallFields, path: str, form: TemplateForm) -> dict[str, Any]:
    arguments = _arguments(call.arguments, f"{path}.arguments", form)
    given = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": _id(call.id, form), **given} if call.id else given


def _arguments(text: str, path: str, form: TemplateForm) -> Any:
    """Return arguments, or their text where it is no JSON object: a model may write what it likes, and be cut."""
    try:
        # Not strict: models break lines within strings.
        value = json.loads(text or "null", parse_constant=refuse_constant, strict=False)
    except RecursionError:
        raise ChatError(path, f"is nested over {MAX_DEPTH} deep") from None
    except ValueError:  # with a json.JSONDecodeError, and a number of too many digits
        value = text
    if is_deeper(value, MAX_DEPTH):
        raise ChatError(path, f"is nested over {MAX_DEPTH} deep")
    if value is None:
        return "{}" if form.text_arguments else {}
    if form.text_arguments:
        return text
    if isinstance(value, dict):
        return value
    if form.raw_arguments == "none":
        raise ChatError(path, "is no JSON object, and the chat template shows no other arguments")
    return {"arguments": text} if form.raw_arguments == "object" else text
