"""A constraint on the output of a request, as vLLM names it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from cadenza.sendable import sendable
from cadenza_common.spelling import suggestion

_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_OF_JSON = ("json", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of the first six fields says what the output must be; immutable.

    Every value is checked on construction, and a ValueError names the field. Whether a schema, an expression or a
    grammar can be followed, the server finds out.
    """

    json: str | dict[str, Any] | bool | None = None  # a JSON schema, as its text or as an object
    regex: str | None = None  # the whole output matches it
    choice: list[str] | None = None  # one of these
    grammar: str | None = None  # Lark, or GBNF
    json_object: bool | None = None  # True: any JSON object
    structural_tag: str | dict[str, Any] | None = None  # structures and triggers, as vLLM takes them
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    start_after_token_ids: list[int] = field(default_factory=list)  # begins once the output has these in a row

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in _FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            listed = ", ".join(given) or "none"
            raise ValueError(f"structured_outputs must have exactly one of {', '.join(_FORMS)}, not {listed}")
        (form,) = given
        self._check_texts(form)
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, "must be True or False", getattr(self, name))
        if form not in _OF_JSON and (self.disable_any_whitespace or self.whitespace_pattern):
            name = "disable_any_whitespace" if self.disable_any_whitespace else "whitespace_pattern"
            raise ValueError(f"structured_outputs.{name} needs json or json_object, not {form}")
        if self.disable_any_whitespace and self.whitespace_pattern:
            raise ValueError("structured_outputs.whitespace_pattern excludes disable_any_whitespace")
        if self.disable_additional_properties and form != "json":
            raise ValueError(f"structured_outputs.disable_additional_properties needs json, not {form}")
        object.__setattr__(self, "start_after_token_ids", _ids(self.start_after_token_ids))

    def _check_texts(self, form: str) -> None:
        value = getattr(self, form)
        if form == "choice":
            object.__setattr__(self, "choice", _choices(value))
        elif form in ("json", "structural_tag"):
            object.__setattr__(self, form, _json_text(form, value))
        elif form == "json_object":
            if value is not True:
                raise _bad(form, "must be True", value)
        else:
            _text(form, value)
        if self.whitespace_pattern is not None:
            _text("whitespace_pattern", self.whitespace_pattern)


def as_structured_outputs(value: object) -> StructuredOutputsParams | None:
    """Return a constraint given as an object or as a dict of its fields; None values of a dict are as absent.

    Raises ValueError.
    """
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"structured_outputs must be None, StructuredOutputsParams or a dict, not {value!r}")
    known = [each.name for each in fields(StructuredOutputsParams)]
    for name in value:
        if name not in known:
            raise ValueError(f"structured_outputs has no field {name!r}{suggestion(str(name), known)}")
    return StructuredOutputsParams(**{name: each for name, each in value.items() if each is not None})


def _bad(name: str, why: str, value: object) -> ValueError:
    return ValueError(f"structured_outputs.{name} {why}, not {value!r}")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _bad(name, "must be a text that is not empty", value)
    sendable(value, f"structured_outputs.{name}")
    return value


def _json_text(name: str, value: object) -> str:
    """Return JSON as its text; raises ValueError for a text that is no JSON."""
    if isinstance(value, str):
        _text(name, value)
        try:
            json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs.{name} is no JSON: {error}") from None
        return value
    try:
        return _text(name, json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs.{name} cannot be written as JSON: {error}") from None


def _choices(value: object) -> list[str]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise _bad("choice", "must be a list of texts", value)
    choices = list(value)
    if not choices:
        raise _bad("choice", "must have at least one entry", choices)
    return [_text("choice", each) for each in choices]


def _ids(value: object) -> list[int]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise _bad("start_after_token_ids", "must be a list of token ids", value)
    ids = list(value)
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**32:
            raise _bad("start_after_token_ids", "must hold token ids (integers of 0 or more)", token_id)
    return ids
