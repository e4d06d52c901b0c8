"""Finds out which tokens made the content of an output, for their logprobs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from gateway_svc.parsing.parts import Mark, Piece


class TokenOwners:
    """Follows the pieces of one output, cut at the ends of tokens, so that parts come with the token they end with."""

    def __init__(self, text_ends: Sequence[int]) -> None:
        """text_ends: where the text of each token ends; it grows with the output."""
        self._text_ends = text_ends
        self._marks = set[int]()
        """Tokens that are markers."""
        self._place = 0
        """In the text: what lies before it has been read."""
        self._num_read = 0
        """Number of tokens whose text has been read, at least in part."""
        self._num_owned = 0
        """Tokens whose owner is known."""

    def split(self, piece: Piece) -> Iterator[Piece]:
        """A piece, cut where its tokens end."""
        if isinstance(piece, Mark):
            self._place += len(piece.shown)
            self._num_read = max(self._num_read, piece.num_tokens)
            self._marks.add(piece.num_tokens - 1)
            yield piece
            return
        start = 0
        while start < len(piece):
            token = bisect_right(self._text_ends, self._place)
            is_known = token < len(self._text_ends)
            size = min(self._text_ends[token] - self._place, len(piece) - start) if is_known else len(piece) - start
            self._place += size
            self._num_read = max(self._num_read, token + 1 if is_known else token)
            yield piece[start : start + size]
            start += size

    def of_content(self, text: str) -> tuple[int, ...]:
        """The tokens that made a text which has just become content; those before them made something else.

        Tokens without a text, as those of a part of a character, belong to the text behind them.
        """
        num_left, found = len(text), list[int]()
        for token in range(self._num_read - 1, self._num_owned - 1, -1):
            start = self._text_ends[token - 1] if token else 0
            size = self._text_ends[token] - start
            if num_left <= 0 and (size or token in self._marks):
                break
            if size or token not in self._marks:
                found.append(token)
            num_left -= size
        self._num_owned = self._num_read
        return tuple(reversed(found))

    def of_others(self) -> None:
        """What has been read has become a thought or a call."""
        self._num_owned = self._num_read

    def rest(self) -> tuple[int, ...]:
        """At the end: the tokens behind all text, as the one that ends the output."""
        start = max(self._num_owned, self._num_read)
        return tuple(each for each in range(start, len(self._text_ends)) if each not in self._marks)
