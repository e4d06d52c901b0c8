"""Tokens to text as they come: never half a character, never what may be the start of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from scheduler_svc.engine.ports import StopMatch

_REPLACEMENT = "\ufffd"
_MAX_WINDOW = 12
"""Tokens decoded at once, at most, before the window is moved on."""
_TAIL_LENGTHS = (5, 6, 7, 8)
"""Lengths tried for the moved window: a character has at most 4 bytes, so one of these starts at a character."""
_MAX_PENDING_TOKENS = 6
"""More tokens than this without a whole character: the bytes are no UTF-8, and are let go."""
_MAX_PENDING_CHARS = 3
"""Of such bytes, this many may still be the start of a character."""


class TokenDecoder(Protocol):
    """What a text stream needs of a tokenizer."""

    special_ids: frozenset[int]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of tokens; bytes that are no UTF-8 come out as U+FFFD."""

    def token_text(self, token_id: int) -> str:
        """Text of one token alone."""


class IncrementalDecoder:
    """Decodes a token at a time, in O(1) tokens each: a sliding window is decoded, and what it adds is handed out.

    The window keeps some tokens that are out already, as TGI and vLLM do, since a token's text depends on those before
    it (leading spaces, bytes of one character). `_done` is the text of the window that is out.
    """

    def __init__(self, tokenizer: TokenDecoder, *, skip_special_tokens: bool, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._window = [token_id for token_id in context if token_id not in self._skipped]
        self._done = self._decode(self._window) if self._window else ""
        if not self._done or self._done.endswith(_REPLACEMENT):
            self._window, self._done = [], ""
        self._num_whole = len(self._window)
        """Tokens of the window after which no character was incomplete."""
        self._limit = _MAX_WINDOW

    def push(self, token_id: int) -> str:
        """Text that this token completes; may be empty."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.startswith(self._done):
            # A byte-fallback tokenizer spoils a whole run of bytes while its last character is incomplete.
            if len(self._window) - self._num_whole <= _MAX_PENDING_TOKENS:
                return ""
            text = self._restart()
        return self._hand_out(text)

    def flush(self) -> str:
        """What is left; half a character comes out as U+FFFD."""
        text = self._decode(self._window)
        if not text.startswith(self._done):
            text = self._restart()
        rest = text[len(self._done) :]
        self._done = text
        return rest

    def _hand_out(self, text: str) -> str:
        """Hand out what is new in the window's text and cannot change; move the window on."""
        fresh = text[len(self._done) :]
        ready = fresh.rstrip(_REPLACEMENT)
        num_pending = len(fresh) - len(ready)
        if ready or not num_pending:
            self._num_whole = len(self._window)
        elif len(self._window) - self._num_whole > _MAX_PENDING_TOKENS and num_pending > _MAX_PENDING_CHARS:
            num_pending = _MAX_PENDING_CHARS
            ready = fresh[:-num_pending]
        self._done += ready
        if len(self._window) > self._limit:
            self._move_on(text, num_pending)
        return ready

    def _move_on(self, text: str, num_pending: int) -> None:
        """Drop tokens from the window's front, at a place where the rest decodes to the same text."""
        for length in _TAIL_LENGTHS:
            tail = self._window[-length:]
            tail_text = self._decode(tail)
            if len(tail_text) > num_pending and text.endswith(tail_text):
                self._num_whole = max(0, self._num_whole - (len(self._window) - length))
                self._window = tail
                self._done = tail_text[: len(tail_text) - num_pending]
                self._limit = _MAX_WINDOW
                return
        self._limit = len(self._window) + _MAX_WINDOW

    def _restart(self) -> str:
        """Begin the window after the last whole character; returns its text."""
        self._window = self._window[self._num_whole :]
        self._num_whole = 0
        self._done = ""
        return self._decode(self._window)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class TextStream:
    """One sample's text (see ports.TextStream), cut at the first stop string.

    Of several stop strings the one that starts first wins, then the one listed first. As in vLLM, a match must be
    completed by a token after the first `min_tokens`. Each token is looked at by itself, so that the result does not
    depend on how many come at once. `context` are the prompt's last tokens, which decide about a leading space.
    """

    __slots__ = ("_begun", "_decoder", "_floor", "_held", "_include_stop", "_min_tokens", "_over", "_stop",
                 "_tokenizer", "text", "text_ends")  # fmt: skip

    def __init__(
        self,
        tokenizer: TokenDecoder,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
    ) -> None:
        self.text = ""
        self.text_ends: list[int] = []
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens, context=context)
        self._stop = tuple(stop)
        self._begun = [0] * len(stop)
        """How much of each stop string the text ends with, but never all of it; the longest of these is held back."""
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._held = ""
        self._floor = 0
        """Length of the text of the first `min_tokens` tokens, in code points; a match must end after it."""
        self._over = False

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> StopMatch | None:
        """Add tokens; returns the stop string that they complete, if they do. What comes after it is not looked at."""
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            silent = ends_with_stop_token and index == last and not self._include_stop
            piece = "" if silent else self._decoder.push(token_id)
            stop_string = self._take(piece) if piece else None
            self.text_ends.append(len(self.text))
            if stop_string is not None:
                self._over = True
                return StopMatch(stop_string, len(self.text_ends))
        return None

    def finish(self) -> None:
        """Let go of what was held back; after a stop string there is nothing."""
        if not self._over:
            self._over = True
            self._release(self._held + self._decoder.flush())
            self._held = ""

    def token_text(self, token_id: int) -> str:
        """The text of one token alone."""
        return self._tokenizer.token_text(token_id)

    def _take(self, piece: str) -> str | None:
        """Add text; returns the stop string that it completes."""
        if not self._stop:
            self._release(piece)
            return None
        text = self._held + piece
        if len(self.text_ends) < self._min_tokens:
            self._floor = len(self.text) + len(text)
        else:
            found = self._find(text)
            if found is not None:
                start, stop_string = found
                self._release(text[: start + len(stop_string)] if self._include_stop else text[:start])
                self._held = ""
                return stop_string
        # A beginning grows by the new text at most: with that limit, a push costs what it adds, however much is held.
        self._begun = [
            _overlap(text, stop_string, begun + len(piece))
            for stop_string, begun in zip(self._stop, self._begun, strict=True)
        ]
        num_held = max(self._begun)
        self._held = text[len(text) - num_held :]
        self._release(text[: len(text) - num_held])
        return None

    def _find(self, text: str) -> tuple[int, str] | None:
        """The first stop string in the text, and where it starts."""
        best: tuple[int, str] | None = None
        floor = self._floor - len(self.text)
        for stop_string in self._stop:
            start = text.find(stop_string, max(0, floor + 1 - len(stop_string)))
            if start >= 0 and (best is None or start < best[0]):
                best = start, stop_string
        return best

    def _release(self, piece: str) -> None:
        # With one reference left, CPython appends in place; `self.text += piece` would copy all text for each token.
        text = self.text
        self.text = ""
        text += piece
        self.text = text


def _overlap(text: str, stop_string: str, limit: int) -> int:
    """Length of the longest end of `text`, up to `limit`, that is the start of `stop_string`, but not all of it."""
    longest = min(limit, len(stop_string) - 1)
    if stop_string[0] not in text[len(text) - longest :]:
        return 0
    for length in range(longest, 0, -1):
        if text.endswith(stop_string[:length]):
            return length
    return 0
