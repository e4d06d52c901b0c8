"""Wraps text at a terminal's right edge between words, also while it streams."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from rich.cells import cell_len

_TAB = 8
_JOINER = "\u200d"
_OPENING = ("Ps", "Pi")
_CLOSING = ("Pe", "Pf", "Po")
"""Unicode categories of brackets, quotes, commas and full stops, which stay with the word before them."""


class Wrapper:
    """Breaks streamed text into lines of at most `width` cells.

    Only the current word is held back. Lines break between words, and around wide characters (Chinese, Japanese,
    Korean); a word that is longer than a line is broken.
    """

    def __init__(self, width: int) -> None:
        """`width`: of a line, in cells; it may be set anew at any time."""
        self.width = width
        self._column = 0
        self._spaces = 0  # before the word; written only if the word follows on the same line
        self._word = ""
        self._word_cells = 0

    def feed(self, text: str) -> str:
        """The part of the text so far that can be shown now and was not yet, with line ends."""
        return "".join(piece for character in text for piece in self._take(character))

    def flush(self) -> str:
        """The rest of the text."""
        word = "".join(self._end_word())
        spaces = " " * min(self._spaces, max(0, self.width - self._column))
        self._column += len(spaces)
        self._spaces = 0
        return word + spaces

    def _take(self, character: str) -> Iterator[str]:
        if character == "\n":
            yield from self._end_word()
            self._spaces = self._column = 0
            yield "\n"
        elif character in " \t":
            yield from self._end_word()
            at = self._column + self._spaces
            self._spaces += 1 if character == " " else _TAB - at % _TAB
        else:
            cells = cell_len(character)
            if self._word and (self._word_cells + cells > self.width or _may_break(self._word[-1], character)):
                yield from self._end_word()
            self._word += character
            self._word_cells += cells

    def _end_word(self) -> Iterator[str]:
        if not self._word:
            return
        if self._column + self._spaces + self._word_cells > self.width:
            if self._column:
                yield "\n"
            self._column = self._spaces = 0
        yield " " * self._spaces + self._word
        self._column += self._spaces + self._word_cells
        self._spaces, self._word, self._word_cells = 0, "", 0


def wrap(text: str, width: int) -> str:
    """The whole text in lines of at most `width` cells."""
    wrapper = Wrapper(width)
    return wrapper.feed(text) + wrapper.flush()


def _may_break(before: str, after: str) -> bool:
    """Whether a line may end between two characters that are neither spaces nor line ends."""
    if not cell_len(after) or before == _JOINER:  # a mark, or the rest of an emoji
        return False
    if unicodedata.category(after) in _CLOSING or unicodedata.category(before) in _OPENING:
        return False
    # A mark before the break has no width of its own; a break between two narrow characters would split a word.
    return cell_len(before) > 1 or cell_len(after) > 1
