"""JSON objects that a client writes for templates."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from scheduler_svc.requests.chats.fields import ChatError

MAX_DEPTH = 64
"""Of JSON: a template that indents writes a line as long as its depth for each value."""


def json_objects(texts: tuple[str, ...], name: str) -> list[dict[str, Any]] | None:
    """Return the objects; None, as transformers has it, for none."""
    return [json_object(text, f"{name}[{index}]") for index, text in enumerate(texts)] or None


def json_object(text: str, path: str) -> dict[str, Any]:
    """Return a JSON object; raises ChatError for anything else."""
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except RecursionError:
        raise ChatError(path, f"is nested over {MAX_DEPTH} deep") from None
    except ValueError as error:  # with a json.JSONDecodeError, and a number of too many digits
        raise ChatError(path, f"is no JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ChatError(path, f"is no JSON object, but {_kind(value)}")
    if is_deeper(value, MAX_DEPTH):
        raise ChatError(path, f"is nested over {MAX_DEPTH} deep")
    return value


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether objects and arrays are nested deeper."""
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(is_deeper(each, depth - 1) for each in inner)


def _kind(value: Any) -> str:
    kinds = {str: "a string", list: "an array", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def refuse_constant(name: str) -> NoReturn:
    """Raise ValueError: for `parse_constant`."""
    raise ValueError(f"{name} is no number of JSON")
