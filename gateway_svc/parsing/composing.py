"""Joins tokens and text to the one marker that they are, as `<|channel|>analysis<|message|>`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gateway_svc.parsing.literals import Codes, keyed
from gateway_svc.parsing.parts import Mark, Marker, Piece, shown_of


class MarkJoiner:
    """Takes the pieces of one output; those that may become a marker are held back."""

    def __init__(self, markers: Sequence[Marker], composed: Sequence[Marker]) -> None:
        """markers: those that pieces have."""
        self._codes = Codes(markers)
        self._texts = [(self._codes.coded(each.text), each) for each in composed]
        self._held: list[Piece] = []

    def feed(self, piece: Piece) -> Iterator[Piece]:
        """Take a piece; gives those that are certain now."""
        self._held.append(piece)
        yield from self._given(is_last=False)

    def finish(self) -> Iterator[Piece]:
        """Give the rest."""
        yield from self._given(is_last=True)

    def _given(self, *, is_last: bool) -> Iterator[Piece]:
        while self._held:
            text = keyed("".join(map(self._codes.encode, self._held)))
            place, size, marker = self._found(text, is_last=is_last)
            yield from self._taken(place)
            if marker is None:
                return
            inner = [*self._taken(size)]
            shown = "".join(map(shown_of, inner))
            yield Mark(marker, shown, max(each.num_tokens for each in inner if isinstance(each, Mark)))

    def _found(self, text: str, *, is_last: bool) -> tuple[int, int, Marker | None]:
        """Where a marker stands first, its size, and which; None: up to where none begins."""
        for place in range(len(text)):
            for coded, marker in self._texts:
                if text.startswith(coded, place):
                    return place, len(coded), marker
            if not is_last and any(coded.startswith(text[place:]) for coded, _ in self._texts):
                return place, 0, None
        return len(text), 0, None

    def _taken(self, num: int) -> Iterator[Piece]:
        """The next pieces, of so many characters."""
        while num and self._held:
            piece = self._held[0]
            size = len(piece) if isinstance(piece, str) else 1
            if isinstance(piece, str) and size > num:
                self._held[0] = piece[num:]
                yield piece[:num]
                return
            del self._held[0]
            num -= size
            yield piece
