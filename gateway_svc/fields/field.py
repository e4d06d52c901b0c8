"""The fields of a request: what each is, and what becomes of it.

One table for each API drives the checks, the pages of docs/openai.md and the tests, so that no field is ignored in
silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cadenza_common.spelling import suggestion
from gateway_svc.http.errors import ApiError, bad_request

_MAX_SHOWN = 80
MAX_NAME = 64
"""Characters of an unknown name that an error repeats."""


class Use(Enum):
    """What becomes of a field."""

    HONOURED = "honoured"
    ACCEPTED = "accepted, without effect"
    """It asks for nothing that would change the answer."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a request."""

    name: str
    kind: str
    """A key of KINDS."""
    use: Use
    ours: str
    """What it does here; for one that is refused, why."""
    theirs: str = ""
    """What vLLM's differs in; empty: the same."""
    neutral: tuple[Any, ...] = ()
    """Of a refused field: values that ask for nothing, and are accepted."""


def honoured(name: str, kind: str, ours: str, theirs: str = "") -> Field:
    """A field that does what it says."""
    return Field(name, kind, Use.HONOURED, ours, theirs)


def accepted(name: str, kind: str, ours: str, theirs: str = "") -> Field:
    """A field that asks for nothing here."""
    return Field(name, kind, Use.ACCEPTED, ours, theirs)


def refused(name: str, ours: str, theirs: str = "", neutral: tuple[Any, ...] = ()) -> Field:
    """A field that nobody here can honour."""
    return Field(name, "any", Use.REFUSED, ours, theirs, neutral)


def by_name(*parts: Sequence[Field]) -> dict[str, Field]:
    """The table of an API; of two fields with one name the later one is used."""
    return {field.name: field for part in parts for field in part}


def as_integers(value: Any) -> Any:
    """A number, or a list of such, with 3 for 3.0, which is an integer too, as in JSON schemas; all else as it is."""
    if isinstance(value, list):
        return [as_integers(each) if isinstance(each, float | list) else each for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_keys(where: str, value: Mapping[str, Any], known: Sequence[str], param: str) -> None:
    """Raise ApiError for keys of an object within a field that are not known; null is as if absent."""
    for name, inner in value.items():
        if name not in known and inner is not None:
            hint = suggestion(name[:MAX_NAME], known)
            raise bad_request(f"{where}.{name[:MAX_NAME]!a}: there is no such field{hint}", param)


def check_kind(name: str, kind: str, value: Any, param: str | None = None) -> None:
    """Raise ApiError unless a value is of a kind; param: the field that it stands in, if that has another name."""
    if not KINDS[kind](value):
        raise wrong_value(name, f"must be {kind}", value, param)


def wrong_value(name: str, why: str, value: Any, param: str | None = None) -> ApiError:
    """The error of a value; param: as for `check_kind`."""
    return bad_request(f"{name} {why}, not {shown(value)}", param or name)


def shown(value: Any) -> str:
    """A value for a message, shortened."""
    if isinstance(value, list | dict):  # they may be long, and nested as deeply as JSON can be
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _is_integer(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_integers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_integer, value))


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


OF_INTEGERS = ("an integer", "a list of integers")
"""Kinds whose numbers may be written 3.0."""
KINDS: Mapping[str, Callable[[Any], bool]] = {
    "any": lambda value: True,
    "a string": lambda value: isinstance(value, str),
    "an integer": _is_integer,
    "a number": _is_number,
    "a boolean": lambda value: isinstance(value, bool),
    "an object": lambda value: isinstance(value, dict),
    "an object of strings": _is_record,
    "a list": lambda value: isinstance(value, list),
    "a list of strings": _is_strings,
    "a list of integers": _is_integers,
    "a string or a list of strings": lambda value: isinstance(value, str) or _is_strings(value),
    "a string or an object": lambda value: isinstance(value, (str, dict)),
    "a string or a list": lambda value: isinstance(value, (str, list)),
}
