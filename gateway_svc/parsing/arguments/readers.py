"""The arguments of one call as a text with markers comes, in each way in which they are written but between tags."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from cadenza_common.call_formats.syntax import CallSyntax
from gateway_svc.parsing.call_json import ARGUMENT_KEYS, CallObject, ValueEnd
from gateway_svc.parsing.literals import Codes, code_in
from gateway_svc.parsing.python_call import PythonArguments


class CallArgumentsReader(Protocol):
    """Reads what a call consists of behind its beginning, from texts whose markers are characters."""

    name: str | None
    """None: not known yet."""

    @property
    def is_call(self) -> bool:
        """Whether it is certain that there is a call."""

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""

    @property
    def is_bad(self) -> bool:
        """Whether there is none."""

    def feed(self, text: str) -> tuple[int, str]:
        """Read a text; returns how much of it is used, and new text of the arguments."""

    def end(self, text: str, *, is_cut: bool) -> tuple[int, str]:
        """The output ends: as `feed`, with what is left."""


class _InStrings:
    """Markers within strings are text; elsewhere, one of the format's ends what is read, and others are text."""

    def __init__(self, codes: Codes, own: Collection[str]) -> None:
        self._codes = codes
        self._own = own
        self.name: str | None = None
        self.is_call = self.is_done = self.is_bad = False

    @property
    def _is_in_string(self) -> bool:
        raise NotImplementedError

    def _read(self, text: str) -> tuple[int, str]:
        raise NotImplementedError

    def feed(self, text: str) -> tuple[int, str]:
        """As CallArgumentsReader."""
        at, found = 0, ""
        while at < len(text) and not (self.is_done or self.is_bad):
            end = code_in(text, at)
            if end == at:
                if not self._is_in_string and text[at] in self._own and not self._takes(text[at]):
                    self._stop()
                    break
                used, new = self._read(self._own_text(text[at]))
                found += new
                if not used:  # it ends what is read, and belongs to what follows
                    break
                at += 1
                continue
            used, new = self._read(text[at : len(text) if end < 0 else end])
            at, found = at + used, found + new
        return at, found

    def _own_text(self, code: str) -> str:
        return self._codes.written(code)

    def _takes(self, code: str) -> bool:
        """Whether a marker outside of strings belongs to what is read."""
        return False

    def _stop(self) -> None:
        """A marker of the format ends what is read: a call that is known stays one."""
        self.is_done, self.is_bad = self.is_call, not self.is_call

    def end(self, text: str, *, is_cut: bool) -> tuple[int, str]:
        """As CallArgumentsReader."""
        return 0, ""


class JsonArguments(_InStrings):
    """An object behind the name."""

    def __init__(self, name: str, codes: Codes, own: Collection[str], *, is_empty: bool) -> None:
        """is_empty: whether there is none, which means an empty one."""
        super().__init__(codes, own)
        self._is_empty = is_empty
        self.name, self.is_call = name, True
        self._end = ValueEnd()

    def feed(self, text: str) -> tuple[int, str]:
        """As CallArgumentsReader."""
        if self._is_empty:
            self.is_done = True
            return 0, "{}"
        return super().feed(text)

    @property
    def _is_in_string(self) -> bool:
        return self._end.is_in_string

    def _read(self, text: str) -> tuple[int, str]:
        end, self.is_done = self._end.find(text, 0)
        return end, text[:end]


class ObjectCall(_InStrings):
    """An object with the name and the arguments."""

    def __init__(self, way: CallSyntax, codes: Codes, own: Collection[str], names: Collection[str] | None) -> None:
        super().__init__(codes, own)
        name_key, argument_key = way.keys
        self._object = CallObject(
            needs_arguments=way.needs_arguments,
            names=names,
            name_key=name_key,
            argument_keys=ARGUMENT_KEYS if argument_key in ARGUMENT_KEYS else (argument_key,),
        )

    @property
    def _is_in_string(self) -> bool:
        return self._object.is_in_string

    def _read(self, text: str) -> tuple[int, str]:
        used, arguments = self._object.feed(text, 0)
        self.name, self.is_call = self._object.name, self._object.is_call
        self.is_done, self.is_bad = self._object.is_done, self._object.is_bad
        return used, arguments


class PythonCall(_InStrings):
    """Keyword arguments, from the bracket on; they are given on at their end, and are no call before."""

    def __init__(self, name: str, codes: Codes, own: Collection[str], quote: str = "") -> None:
        """quote: the character of the marker around strings, where the bracket is a brace and keys are bare."""
        super().__init__(codes, own)
        self.name = name
        self._quote = quote
        self._arguments = PythonArguments(quote)

    @property
    def _is_in_string(self) -> bool:
        return self._arguments.is_in_string

    def _takes(self, code: str) -> bool:
        return code == self._quote

    def _own_text(self, code: str) -> str:
        return code if code == self._quote else super()._own_text(code)

    def _read(self, text: str) -> tuple[int, str]:
        used = self._arguments.feed(text, 0)
        self.is_bad, self.is_done = self._arguments.is_bad, self._arguments.is_done
        self.is_call = self.is_done
        return used, self._arguments.json if self.is_done else ""
