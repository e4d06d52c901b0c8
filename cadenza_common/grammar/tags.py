"""Free text with tagged parts: vLLM's structures and triggers, and the newer form that vLLM and SGLang take too.

See https://docs.vllm.ai/en/latest/features/structured_outputs.html and, for `format`, of which triggered tags are
supported, https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html. In llguidance's Lark a trigger ends a lazy
lexeme, so that it cannot be passed over as text
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md#tool-calling).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cadenza_common.grammar.json_schema import whole_sizes, with_whitespace
from cadenza_common.grammar.readable import readable

SpecialId = Callable[[str], int | None]
"""The id of the special token that a text is; None: it is none. Text never matches a special token."""
_FORM = "the structural tag must be an object with structures (each with begin, schema and end) and triggers"
_FORMAT = "the structural tag's format must be an object of type triggered_tags with tags and triggers"
_NEUTRAL = {"at_least_one": False, "stop_after_first": False, "excludes": []}
"""What a format may ask for beside tags and triggers, as far as that is nothing."""


@dataclass(frozen=True, slots=True)
class _Tag:
    trigger: str
    begin: str
    """It begins with the trigger."""
    body: str | None
    """In Lark; None: any text up to the end."""
    end: str


def grammar_of_tags(content: Any, special_id: SpecialId) -> str:
    """The grammar of a structural tag; raises ValueError, with what is wrong or not supported."""
    is_new = isinstance(content, dict) and "format" in content
    tags = _of_format(content) if is_new else _of_structures(content)
    rules = ["%llguidance {}", f"start: ({' | '.join(f'tag_{index}' for index in range(len(tags)))})* tag_end"]
    rules += ["tag_end: TAG_TEXT", r"TAG_TEXT: /(.|\n)*/"]
    for index, tag in enumerate(tags):
        rules += _rules(f"tag_{index}", tag, special_id)
    return "\n".join(rules)


def _rules(name: str, tag: _Tag, special_id: SpecialId) -> list[str]:
    trigger = tag.trigger if special_id(tag.begin) is None else tag.begin  # a special token has no parts
    special = special_id(trigger)
    rules = [] if special is not None else [f"{name}_trigger[lazy]: TAG_TEXT {_literal(trigger)}"]
    head = f"{name}_trigger" if special is None else f"TAG_TEXT <[{special}]>"
    body, end = tag.body, _text(tag.end, special_id)
    if body is None and special_id(tag.end) is None:
        rules.append(f"{name}_body[lazy]: TAG_TEXT {end}")
        body, end = f"{name}_body", ""
    elif body is None:
        body = "TAG_TEXT"
    parts = (head, _text(tag.begin.removeprefix(trigger), special_id), body, end)
    return [*rules, f"{name}: {' '.join(part for part in parts if part)}"]


def _of_structures(content: Any) -> list[_Tag]:
    structures, triggers = _lists(content, ("structures", "triggers"), _FORM, ("type",))
    tags = []
    for each in structures:
        if not isinstance(each, dict) or any(not isinstance(each.get(name), str) for name in ("begin", "end")):
            raise ValueError(_FORM)
        _check_keys(each, ("begin", "schema", "end"))
        tags.append(_tag(triggers, each["begin"], _schema(each.get("schema"), _FORM), each["end"]))
    return tags


def _of_format(content: dict[str, Any]) -> list[_Tag]:
    _check_keys(content, ("type", "format"))
    found = content["format"]
    if not isinstance(found, dict) or found.get("type") != "triggered_tags":
        raise ValueError(_FORMAT)
    for name, value in _NEUTRAL.items():
        if found.get(name, value) != value:
            raise ValueError(f"the structural tag: {name} is not supported, but for {json.dumps(value)}")
    listed, triggers = _lists(found, ("tags", "triggers"), _FORMAT, ("type", *_NEUTRAL))
    tags = []
    for each in listed:
        if not isinstance(each, dict) or each.get("type", "tag") != "tag":
            raise ValueError(_FORMAT)
        _check_keys(each, ("type", "begin", "content", "end"))
        begin, end = each.get("begin"), each.get("end")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise ValueError("the structural tag: begin and end of each tag must be strings")
        tags.append(_tag(triggers, begin, _body(each.get("content")), end))
    return tags


def _lists(value: Any, names: Sequence[str], form: str, others: Sequence[str]) -> tuple[list[Any], list[str]]:
    """The tags and the triggers of an object."""
    tags, triggers = (value.get(name) for name in names) if isinstance(value, dict) else (None, None)
    if not isinstance(tags, list) or not isinstance(triggers, list):
        raise ValueError(form)
    _check_keys(value, (*names, *others))
    if not tags:
        raise ValueError(f"the structural tag has no {names[0]}")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError("the structural tag: triggers must be strings, and not empty")
    return tags, triggers


def _tag(triggers: Sequence[str], begin: str, body: str | None, end: str) -> _Tag:
    # A longer trigger begins with the shorter one, so the shorter one appears first.
    trigger = min((trigger for trigger in triggers if begin.startswith(trigger)), key=len, default=None)
    if trigger is None:
        raise ValueError(f"no trigger is the beginning of the tag {begin!r}")
    if body is None and not end:
        raise ValueError(f"the tag {begin!r} has any text, and no end")
    return _Tag(trigger, begin, body, end)


def _body(content: Any) -> str | None:
    kind = content.get("type") if isinstance(content, dict) else None
    match kind:
        case "json_schema":
            _check_keys(content, ("type", "json_schema"))
            return _schema(content.get("json_schema"), "the structural tag: json_schema must be a JSON schema")
        case "const_string" if isinstance(content.get("value"), str) and content["value"]:
            _check_keys(content, ("type", "value"))
            return _literal(content["value"])
        case "any_text":
            _check_keys(content, ("type",))
            return None
    raise ValueError(f"the structural tag: content must be json_schema, const_string or any_text, not {kind!a:.40}")


def _schema(value: Any, form: str) -> str:
    """A JSON schema, or its text, in Lark."""
    if isinstance(value, str):
        try:
            value = json.loads(value, object_hook=whole_sizes)
        except (ValueError, RecursionError):
            raise ValueError(form) from None
    if value is True:
        value = {}
    if not isinstance(value, dict):
        raise ValueError(form)
    return f"%json {json.dumps(with_whitespace(readable(value)))}"


def _check_keys(value: dict[str, Any], known: Sequence[str]) -> None:
    """Raise ValueError for a key that is not known: none is ignored in silence."""
    for name in value:
        if name not in known:
            raise ValueError(f"the structural tag: {name!a:.64} is not supported; {', '.join(known)} are")


def _text(text: str, special_id: SpecialId) -> str:
    if not text:
        return ""
    special = special_id(text)
    return _literal(text) if special is None else f"<[{special}]>"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
