"""Checks what transformers reads from tokenizer_config.json without a look at its types."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cadenza_common.brief import brief

_FILE = "tokenizer_config.json"
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _is_template(value: Any) -> bool:
    """Return whether this is a text, or several by name in one of transformers' two forms."""
    if isinstance(value, dict):
        return all(isinstance(each, str) for each in value.values())
    if isinstance(value, list):
        return all(
            isinstance(each, dict) and isinstance(each.get("name"), str) and isinstance(each.get("template"), str)
            for each in value
        )
    return isinstance(value, str)


def _are_added(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, dict) and _is_token(each) for each in value.values())


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_TOKENS, (_is_token, "must be a text, or an object with its content")),
    **dict.fromkeys(
        ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces"),
        (lambda value: isinstance(value, bool), "must be true or false"),
    ),
    "tokenizer_class": (lambda value: isinstance(value, str), "must be a text"),
    "model_max_length": (
        lambda value: isinstance(value, int | float) and not isinstance(value, bool),
        "must be a number",
    ),
    "chat_template": (_is_template, "must be a text, or a list of objects with name and template"),
    "added_tokens_decoder": (_are_added, "must be an object of objects with the content of a token"),
}


def problem_of(folder: Path) -> str | None:
    """Return what is wrong with a folder's tokenizer_config.json, None if nothing is, or there is none."""
    path = folder / _FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        return f"{_FILE} cannot be read: it is nested too deeply"
    except (OSError, ValueError) as error:
        return f"{_FILE} cannot be read: {error}"
    if not isinstance(content, dict):
        return f"{_FILE} holds no JSON object"
    for name, (is_right, rule) in _FIELDS.items():
        value = content.get(name)
        if value is not None and not is_right(value):
            return f"{_FILE}: {name} {rule}, not {brief(value)}"
    return None
