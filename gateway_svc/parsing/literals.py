"""Texts with markers in them, found in an output: a marker is one character there, whatever its tokens are.

It is half of a surrogate pair, which no decoded text has, so that strings and expressions of Python search for both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gateway_svc.parsing.parts import Mark, Marker, Piece

MORE, FAIL = -1, -2
"""In place of an end: the text may become the literal, or it is none."""
_FIRST_CODE = 0xD800
_CODE = re.compile("[\ud800-\udfff]")
_SHOWN = {code + 1: code for code in range(_FIRST_CODE, 0xE000, 2)}
_PARTS = re.compile(r"(\s+|\{(?:id|index|name|type)\})")
_HOLES = {
    "{id}": re.compile(r"[\w.:-]*"),
    "{name}": re.compile(r"[\w.:/-]*"),
    "{index}": re.compile(r"\d*"),
    "{type}": re.compile(r"\w*"),
}


class Codes:
    """The characters that stand for markers."""

    def __init__(self, markers: Sequence[Marker]) -> None:
        self._markers = {chr(_FIRST_CODE + 2 * index): marker for index, marker in enumerate(markers)}
        self._of = {marker.text: code for code, marker in self._markers.items()}
        texts = sorted(self._of, key=len, reverse=True)
        self._texts = re.compile("|".join(map(re.escape, texts))) if texts else None

    def encode(self, piece: Piece) -> str:
        """A piece as text; a marker whose text is left out is another character."""
        if not isinstance(piece, Mark):
            return piece
        code = self._of[piece.marker.text]
        return code if piece.shown else chr(ord(code) + 1)

    def shown(self, text: str) -> str:
        """The text that an output shows."""
        return _CODE.sub(lambda found: self._shown(found.group()), text)

    def written(self, text: str) -> str:
        """The text within a string of a call, which markers that are left out belong to."""
        return _CODE.sub(lambda found: self._markers[keyed(found.group())].text, text)

    def _shown(self, code: str) -> str:
        marker = self._markers.get(code)
        return "" if marker is None or marker.is_nothing else marker.text

    def spelled(self, text: str) -> str:
        """A literal's text as an output spells it where its markers are no tokens; empty: they are."""
        codes = _CODE.findall(text)
        return "" if any(self._markers[code].token_id is not None for code in codes) else self.written(text)

    def coded(self, text: str) -> str:
        """A text whose markers are characters."""
        return text if self._texts is None else self._texts.sub(lambda found: self._of[found.group()], text)

    def literal(self, text: str, *, spaced: bool = False) -> Literal:
        """A literal with these markers; spaced: space may stand on both sides of each."""
        coded = self.coded(text)
        return Literal(_CODE.sub(lambda found: f" {found.group()} ", coded) if spaced else coded)


def keyed(text: str) -> str:
    """A text in which markers are the same characters whether they are shown or not."""
    return text.translate(_SHOWN) if _CODE.search(text) else text


def code_in(text: str, start: int = 0) -> int:
    """Where the first marker is; -1: nowhere."""
    found = _CODE.search(text, start)
    return -1 if found is None else found.start()


class Header:
    """An expression in place of a literal, for what begins and ends as it likes."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)

    def match(self, text: str, at: int) -> int:
        """As Literal."""
        found = self._pattern.match(text, at)
        end = FAIL if found is None else found.end()
        return MORE if end == len(text) else end


class Literal:
    """A text to find: space in it may be any, or none."""

    def __init__(self, text: str) -> None:
        self._parts = [part for part in _PARTS.split(text) if part]
        self.begins = next((part[0] for part in self._parts if not part.isspace()), "")
        """Its first character that is no space; empty: it has none."""
        self.codes = frozenset(_CODE.findall(text))

    def atoms(self) -> list[Literal]:
        """Its texts between space, each of its markers apart."""
        texts = [piece for part in self._parts for piece in re.split("([\ud800-\udfff])", part)]
        return [Literal(text) for text in texts if text and not text.isspace() and text not in _HOLES]

    def match(self, text: str, at: int, holes: dict[str, str] | None = None) -> int:
        """The end of the literal at this place of a text, MORE or FAIL."""
        for part in self._parts:
            hole = _HOLES.get(part)
            if hole is not None:
                found = hole.match(text, at)
                end = at if found is None else found.end()
                if end == len(text):
                    return MORE
                if holes is not None:
                    holes[part] = text[at:end]
                at = end
            elif part.isspace():
                while at < len(text) and text[at].isspace():
                    at += 1
            elif text.startswith(part, at):
                at += len(part)
            else:
                return MORE if part.startswith(text[at:]) else FAIL
        return at

    def find(self, text: str, start: int = 0) -> tuple[int, int]:
        """Where it is first, and its end; MORE as its end if it may begin there; (length, FAIL): it is nowhere."""
        at = text.find(self.begins, start)
        while at >= 0:
            end = self.match(text, at)
            if end != FAIL:
                return at, end
            at = text.find(self.begins, at + 1)
        return len(text), FAIL
