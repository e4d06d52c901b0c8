"""What an answer is made of: content and calls."""

from __future__ import annotations

from collections.abc import Iterator

from gateway_svc.parsing.parts import CallArguments, CallBegin, Content, Part

CLOSING = "]}"
"""Brackets too many behind a call are no content."""


class AnswerBuilder:
    """Makes content and calls of what a parser has found. Whitespace next to a call is no content."""

    def __init__(self) -> None:
        self._space = ""
        """Whitespace that may be next to a call."""
        self.num_calls = 0

    def text(self, text: str) -> Iterator[Part]:
        """Content, some of which may come later."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            yield Content(kept)

    def begin(self, name: str) -> Iterator[Part]:
        """A call."""
        self._space = ""
        yield CallBegin(self.num_calls, name)
        self.num_calls += 1

    def arguments(self, text: str) -> Iterator[Part]:
        """More of the arguments of the newest call."""
        if text:
            yield CallArguments(self.num_calls - 1, text)

    def finish(self) -> Iterator[Part]:
        """Give the rest."""
        if self._space and not self.num_calls:
            yield Content(self._space)
        self._space = ""
