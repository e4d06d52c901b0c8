"""What a template sees of a chat: the names and forms that transformers' templates are written for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from scheduler_svc.requests.chats.fields import ChatError, ChatFields, MessageFields, ToolCallFields

MAX_DEPTH = 64
"""Of JSON: a template that indents writes a line as long as its depth for each value."""
_RESERVED = frozenset(
    "messages add_generation_prompt continue_final_message tools documents template template_kwargs chat_template "
    "chat_template_kwargs".split()
)
"""What a chat has in fields of their own, in our names and in those of other servers."""


def template_variables(chat: ChatFields, special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a chat's template; raises ChatError for what is not JSON.

    special_tokens: those of the tokenizer by name, such as bos_token; arguments of the request override them.
    """
    arguments = _object(chat.template_kwargs, "template_kwargs") if chat.template_kwargs else {}
    for name in arguments:
        if name in _RESERVED:
            raise ChatError("template_kwargs", f"must not have {name}, which is a field of its own")
    return {
        **special_tokens,
        **arguments,
        "messages": [_message(each, f"messages[{index}]") for index, each in enumerate(chat.messages)],
        "tools": _objects(chat.tools, "tools"),
        "documents": _objects(chat.documents, "documents"),
        "add_generation_prompt": chat.adds_generation_prompt,
    }


def _message(message: MessageFields, path: str) -> dict[str, Any]:
    """Return a message in OpenAI's form, without the fields that it does not have.

    So transformers gives them to templates: many ask whether there are `tool_calls`, and write None as "None".
    """
    given: dict[str, Any] = {"role": message.role}
    if message.content is not None:
        given["content"] = message.content
    if message.reasoning_content is not None:
        # The second name is that of gpt-oss.
        given["reasoning_content"] = given["thinking"] = message.reasoning_content
    if message.tool_calls:
        given["tool_calls"] = [
            _tool_call(each, f"{path}.tool_calls[{index}]") for index, each in enumerate(message.tool_calls)
        ]
    for name in ("tool_call_id", "name"):
        if getattr(message, name):
            given[name] = getattr(message, name)
    return given


def _tool_call(call: ToolCallFields, path: str) -> dict[str, Any]:
    arguments = _object(call.arguments, f"{path}.arguments") if call.arguments else {}
    given = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": call.id, **given} if call.id else given


def _objects(texts: tuple[str, ...], name: str) -> list[dict[str, Any]] | None:
    """Return the objects; None, as transformers has it, for none."""
    return [_object(text, f"{name}[{index}]") for index, text in enumerate(texts)] or None


def _object(text: str, path: str) -> dict[str, Any]:
    """Return a JSON object; raises ChatError for anything else."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ChatError(path, f"is nested over {MAX_DEPTH} deep") from None
    except ValueError as error:  # with a json.JSONDecodeError, and a number of too many digits
        raise ChatError(path, f"is no JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ChatError(path, f"is no JSON object, but {_kind(value)}")
    if _is_deeper(value, MAX_DEPTH):
        raise ChatError(path, f"is nested over {MAX_DEPTH} deep")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_is_deeper(each, depth - 1) for each in inner)


def _kind(value: Any) -> str:
    kinds = {str: "a string", list: "an array", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
