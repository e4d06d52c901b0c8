"""Reads a tool call that is written as Python: name(key=value, …), with literals as values."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

NAME = re.compile(r"[A-Za-z_][\w.-]*")
_WORDS = {"true": True, "false": False, "null": None}
"""What models write in place of Python's names."""
MAX_CHARS = 65_536
"""Of one call: more is no call, as a parser of Python must not be given any length."""


class CallEnd:
    """Finds the bracket that closes a call, whose characters come one by one, from the opening one on."""

    __slots__ = ("_depth", "_is_escaped", "_quote")

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    @property
    def is_string(self) -> bool:
        """Whether the next character is in a string."""
        return bool(self._quote)

    def is_last(self, char: str) -> bool:
        """Take the next character; whether the call ends with it."""
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "'\"":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            return self._depth == 0
        return False


def arguments_of(text: str) -> str | None:
    """Return the arguments of a call, as the text of a JSON object; None for what is no call with literals.

    text: from the opening bracket to the closing one.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            return None
        values = {str(each.arg): _value(each.value) for each in call.keywords if each.arg is not None}
        if len(values) < len(call.keywords):  # one is there twice, or is **others
            return None
        found = json.dumps(values, ensure_ascii=False, allow_nan=False)
        found.encode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return found


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, str | int | float):
            return value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if type(value) in (int, float):
            return -value  # type: ignore[operator]
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError("no key of JSON")
    return node.value
