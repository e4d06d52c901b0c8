"""Splits an output into text and markers, which are known by their tokens, or by their text where they have none."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gateway_svc.parsing.parts import Mark, Marker, Piece


@dataclass(frozen=True, slots=True)
class _MarkerPlace:
    """Where a marker's token stands in the text, in code points."""

    marker: Marker
    start: int
    end: int
    num_tokens: int


class PieceReader:
    """Reads one output, in deltas of any size: where they are cut changes no piece but for how text is cut.

    The scheduler says where the text of each token ends, so that the place of a token is known even if it has no text,
    or if its text stands elsewhere too.
    """

    def __init__(self, markers: Sequence[Marker], *, skips_special: bool) -> None:
        """skips_special: whether the texts are without special tokens."""
        self._by_id = {marker.token_id: marker for marker in markers if marker.token_id is not None}
        self._by_text = {marker.text: marker for marker in markers if marker.token_id is None}
        self._pattern = re.compile("|".join(map(re.escape, self._by_text))) if self._by_text else None
        self._skips_special = skips_special
        self._places: deque[_MarkerPlace] = deque()
        self.text_ends: list[int] = []
        """Where the text of each token ends."""
        self._text = ""
        """What has not been given on; it begins at `_start` of the whole text."""
        self._start = 0
        self._end = 0

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self.text_ends)

    def feed(self, text: str, token_ids: Sequence[int], text_ends: Sequence[int]) -> list[Piece]:
        """Add a delta, and return the pieces that are certain now."""
        for token_id, end in zip(token_ids, text_ends, strict=True):
            self.text_ends.append(end)
            marker = self._by_id.get(token_id)
            if marker is not None:
                is_hidden = marker.is_special and self._skips_special
                start = end if is_hidden else end - len(marker.text)
                self._places.append(_MarkerPlace(marker, start, end, len(self.text_ends)))
        self._text += text
        self._end += len(text)
        pieces: list[Piece] = []
        while self._places and self._places[0].end <= self._end:
            self._pass_place(self._places.popleft(), pieces)
        limit = min(self._end, self._places[0].start) if self._places else self._end
        self._pass_text(max(limit, self._start), pieces, is_last=False)
        return pieces

    def finish(self) -> list[Piece]:
        """Return the rest. A stop string may have taken the text of the last tokens."""
        pieces: list[Piece] = []
        while self._places:
            self._pass_place(self._places.popleft(), pieces)
        self._pass_text(self._end, pieces, is_last=True)
        return pieces

    def _pass_place(self, place: _MarkerPlace, pieces: list[Piece]) -> None:
        start, end = (max(min(each, self._end), self._start) for each in (place.start, place.end))
        shown = self._text[start - self._start : end - self._start]
        if shown != place.marker.text:  # left out, or cut
            start, shown = end, ""
        self._pass_text(start, pieces, is_last=True)
        self._take(len(shown))
        pieces.append(Mark(place.marker, shown, place.num_tokens))

    def _pass_text(self, end: int, pieces: list[Piece], *, is_last: bool) -> None:
        """Give on the text up to a place; is_last: no text follows that could complete a marker."""
        if self._pattern is not None:
            while (found := self._pattern.search(self._text, 0, end - self._start)) is not None:
                if found.start():
                    pieces.append(self._text[: found.start()])
                place = self._start + found.end()
                self._take(found.end())
                num_tokens = min(bisect_left(self.text_ends, place) + 1, len(self.text_ends))
                pieces.append(Mark(self._by_text[found.group()], found.group(), num_tokens))
            if not is_last:
                end -= num_begun(self._text[: end - self._start], self._by_text)
        if end > self._start:
            pieces.append(self._text[: end - self._start])
            self._take(end - self._start)

    def _take(self, num_chars: int) -> None:
        self._text = self._text[num_chars:]
        self._start += num_chars


def num_begun(text: str, markers: Collection[str]) -> int:
    """Length of the longest end of a text that is the beginning of a marker, and not all of it."""
    longest = max(map(len, markers)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers if len(marker) > length):
            return length
    return 0
