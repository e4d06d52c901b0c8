"""Checked access to config.json: errors about missing values, wrong types and wrong ranges name the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cadenza_common.brief import brief, one_line
from executor_svc.models.base import ModelConfigError

_LARGEST = (1 << 63) - 1
"""Of an integer: sizes are those of memory."""
_FLOAT_BITS = 1000
_MOST_NAMED = 200
"""Characters of a field's place; files may name objects as they like."""


class Fields:
    """The fields of config.json, or of an object in it. A null field counts as absent."""

    def __init__(
        self,
        content: dict[str, Any],
        path: str = "",
        file: str = "config.json",
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """content: an object; path: its place in the file: "" for the whole file, else "name.".

        names: what a family calls the fields that others call otherwise; they may have either name.
        """
        self._content = content
        self._path = path
        self._file = file
        self._names = names

    def error(self, name: str, problem: str) -> ModelConfigError:
        """Return an error about a field, for the caller to raise."""
        return ModelConfigError(f"{self._file}: {one_line(self._path + self._own(name), _MOST_NAMED)} {problem}")

    def has(self, name: str) -> bool:
        """Return whether the field is present, even if null."""
        return self._own(name) in self._content

    def get(self, name: str) -> Any:
        """Return a field unchecked, None if it is absent."""
        return self._content.get(self._own(name))

    def _own(self, name: str) -> str:
        """Return the name that a field has in this file."""
        own = self._names.get(name, name)
        return name if own not in self._content and name in self._content else own

    def having(self, name: str, value: Any) -> Fields:
        """Return these fields with another value of one."""
        return Fields({**self._content, self._own(name): value}, self._path, self._file, self._names)

    def integer(self, name: str, default: int | None = None, at_most: int | None = None) -> int:
        """Return a positive integer, up to `at_most` or 2^63 - 1; without a default the field is required."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, f"must be a positive integer, not {brief(value)}")
        most = _LARGEST if at_most is None else at_most
        if value > most:
            raise self.error(name, f"must be at most {most}, not {brief(value)}")
        return value

    def number(self, name: str, default: float | None = None, at_least: float | None = None) -> float:
        """Return a finite number, above 0 or at least `at_least`; without a default the field is required."""
        value: Any = self.get(name)
        value = default if value is None else value
        wanted = "above 0" if at_least is None else f"of at least {at_least:g}"
        if not is_number(value) or (value <= 0 if at_least is None else value < at_least):
            raise self.error(name, f"must be a number {wanted}, not {brief(value)}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Return a number above 0, or None if the field is absent."""
        return None if self.get(name) is None else self.number(name)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` finite numbers above 0."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) != count or not all(is_number(v) and v > 0 for v in value):
            shown = f"{len(value)} entries" if isinstance(value, list) else brief(value)
            raise self.error(name, f"must be a list of {count} numbers above 0, not {shown}")
        return tuple(map(float, value))

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean field."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {brief(value)}")
        return value

    def text(self, name: str) -> str | None:
        """Return a text, None if the field is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, f"must be a text, not {brief(value)}")
        return value

    def section(self, name: str) -> Fields:
        """Return the object in a field; empty if the field is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"must be an object, not {brief(value)}")
        return Fields(value or {}, f"{self._path}{name}.", self._file)

    def sections(self) -> list[str]:
        """Return the names of the fields that hold objects."""
        return [name for name, value in self._content.items() if isinstance(value, dict)]

    def names(self) -> list[str]:
        """Return the names of all fields."""
        return list(self._content)

    def refuse(self, name: str, problem: str) -> None:
        """Raise an error if a field has a value other than null, false, 0 or empty."""
        if self.get(name):
            raise self.error(name, f"is {brief(self.get(name))}: {problem}")


def is_number(value: object) -> bool:
    """Return whether a value is a finite number that a float can hold."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value.bit_length() <= _FLOAT_BITS
    return isinstance(value, float) and math.isfinite(value)
