"""Patterns of linears' names, as config.json holds them: whoever wrote the file cannot make a start hang with one."""

from __future__ import annotations

import time

import regex

from executor_svc.models.folder import LoaderError

_MOST_CHARACTERS = 1000
_MOST_SECONDS = 1.0
"""Of the processor, for all matches of a pattern. Those of published checkpoints take microseconds each."""


class PatternError(ValueError):
    """A text is no pattern; the message names it."""


class NamePattern:
    """A regular expression in Python's grammar, matched at the beginning of a name as `re.match` does.

    The time of its matches is limited: backtracking of some patterns takes longer than a person lives.
    """

    def __init__(self, text: str) -> None:
        """Raise PatternError for a text that is no pattern, or that has more than 1000 characters."""
        if len(text) > _MOST_CHARACTERS:
            raise PatternError(
                f"a pattern of {len(text)} characters, which begins with {text[:40]!r}: at most {_MOST_CHARACTERS} "
                "are supported"
            )
        try:
            self._compiled = regex.compile(text)
        except (regex.error, OverflowError, RecursionError, ValueError) as error:
            raise PatternError(f"{text!r}, which is not a pattern: {error}") from error
        self._text = text
        self._seconds_left = _MOST_SECONDS

    def __repr__(self) -> str:
        return f"NamePattern({self._text!r})"

    def match(self, name: str) -> bool:
        """Return whether a name begins with the pattern; raises LoaderError if the pattern's time is spent."""
        began = time.thread_time()
        try:
            if self._seconds_left <= 0:
                raise TimeoutError
            return self._compiled.match(name, timeout=self._seconds_left) is not None
        except TimeoutError:
            raise LoaderError(
                f"config.json: the pattern {self._text!r} takes more than {_MOST_SECONDS:g} s to match names of linears"
            ) from None
        finally:
            self._seconds_left -= time.thread_time() - began
