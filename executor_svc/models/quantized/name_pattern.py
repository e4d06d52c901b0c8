"""Patterns of modules' names, as files hold them: whoever wrote the file cannot make a load hang or take all memory."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

import regex

from cadenza_common.brief import brief
from executor_svc.models.folder import LoaderError

_MOST_CHARACTERS = 1000
_MOST_REPEATED = 200_000
"""Characters of a pattern times all its counts of repeats: compiling one takes memory for each repeat of a repeat."""

_MOST_SECONDS = 1.0
"""Of the processor, for all matches of a pattern. Those of published checkpoints take microseconds each."""

_COUNTS = re.compile(r"\{([^{}]*)\}")

Result = TypeVar("Result")


class PatternError(ValueError):
    """A text is no pattern; the message names it."""


class MatchTime:
    """Time of the processor that matches may take in all: of one pattern, or of several that share it."""

    def __init__(self, seconds: float = _MOST_SECONDS) -> None:
        self.seconds = seconds
        self._left = seconds

    def spend(self, work: Callable[[float], Result]) -> Result:
        """Return the result of `work`, which takes the seconds left; raises TimeoutError if no time is left."""
        if self._left <= 0:
            raise TimeoutError
        began = time.thread_time()
        try:
            return work(self._left)
        finally:
            self._left -= time.thread_time() - began


class NamePattern:
    """A regular expression in Python's grammar.

    The time of its matches is limited: backtracking of some patterns takes longer than a person lives.
    """

    def __init__(self, text: str, limit: MatchTime | None = None, file: str = "config.json") -> None:
        """Take a pattern of a file, whose matches take their time from `limit`, by default 1 s of their own.

        Raises PatternError for a text that is no pattern, that has more than 1000 characters, or whose repeats of
        repeats would take much memory; LoaderError if no time is left.
        """
        if len(text) > _MOST_CHARACTERS:
            raise PatternError(
                f"a pattern of {len(text)} characters, which begins with {text[:40]!r}: at most {_MOST_CHARACTERS} "
                "are supported"
            )
        counts = [int(count) for braces in _COUNTS.findall(text) for count in re.findall("[0-9]+", braces)]
        if len(text) * math.prod(max(1, count) for count in counts) > _MOST_REPEATED:
            raise PatternError(
                f"{brief(text)}, whose repeats multiply to too many: patterns like that are not supported"
            )
        self._text = text
        self._file = file
        self._limit = limit or MatchTime()
        try:
            self._compiled: Any = self._spend(lambda _: regex.compile(text))
        except (regex.error, OverflowError, RecursionError, ValueError) as error:
            raise PatternError(f"{brief(text)}, which is not a pattern: {error}") from error

    def __repr__(self) -> str:
        return f"NamePattern({self._text!r})"

    def match(self, name: str) -> bool:
        """Return whether a name begins with the pattern, as `re.match`; raises LoaderError if the time is spent."""
        return self._spend(lambda left: self._compiled.match(name, timeout=left)) is not None

    def fullmatch(self, name: str) -> bool:
        """Return whether the pattern is of the whole name, as `re.fullmatch`; raises LoaderError likewise."""
        return self._spend(lambda left: self._compiled.fullmatch(name, timeout=left)) is not None

    def group(self, name: str, group: str) -> str | None:
        """Return a named group of `match`, None without a match; raises LoaderError likewise."""
        found = self._spend(lambda left: self._compiled.match(name, timeout=left))
        return None if found is None else found.groupdict().get(group)

    def _spend(self, work: Callable[[float], Result]) -> Result:
        try:
            return self._limit.spend(work)
        except TimeoutError:
            raise LoaderError(
                f"{self._file}: the pattern {brief(self._text)} takes more than {self._limit.seconds:g} s to match "
                "names of linears"
            ) from None
