"""Takes the texts off that stand around an answer behind a thought, as `<response>`: at its very start and end."""

from __future__ import annotations

from collections.abc import Iterator

from gateway_svc.parsing.parts import Content, Part, Thought
from gateway_svc.parsing.pieces import num_begun


class AnswerFrame:
    """Takes the parts of one output."""

    def __init__(self, start: str, end: str) -> None:
        self._start, self._end = start, end
        self._is_open: bool | None = None
        """None: the answer has not begun."""
        self._held = ""

    def feed(self, part: Part) -> Iterator[Part]:
        """Take a part; gives those that are certain now."""
        if not isinstance(part, Content):
            if not isinstance(part, Thought):
                yield from self.finish()
            yield part
            return
        self._held += part.text
        if self._is_open is None:
            text = self._held.lstrip()
            if self._start.startswith(text) and text != self._start:
                return
            self._is_open = text.startswith(self._start)
            self._held = text.removeprefix(self._start) if self._is_open else self._held
        yield from self._given()

    def finish(self) -> Iterator[Part]:
        """Give the rest."""
        text, self._held = self._held, ""
        text = text.rstrip().removesuffix(self._end) if self._is_open and text.rstrip().endswith(self._end) else text
        if text:
            yield Content(text)

    def _given(self) -> Iterator[Part]:
        """What cannot be the end, with space behind it."""
        text = self._held
        place = len(text)
        if self._is_open:
            kept = text.rstrip()
            whole = kept.endswith(self._end)
            place = len(kept) - (len(self._end) if whole else num_begun(text, (self._end,)) if kept == text else 0)
        self._held = text[place:]
        if place:
            yield Content(text[:place])
