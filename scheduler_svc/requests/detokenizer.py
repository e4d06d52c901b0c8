"""Incremental detokenization: holds back incomplete characters and possible starts of stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from scheduler_svc.plan_loop.ports import StopMatch

_REPLACEMENT = "\ufffd"
_MAX_WINDOW = 12
"""Maximum tokens in the decoded window before it moves on."""
_TAIL_LENGTHS = (5, 6, 7, 8)
"""Lengths tried for the moved window: a character has at most 4 bytes, so one of them starts at a character."""
_MAX_PENDING_TOKENS = 6
"""After more tokens than this without a complete character, the bytes count as invalid UTF-8 and are released."""
_MAX_PENDING_CHARS = 3
"""Number of such bytes, at the end, that may still be the start of a character."""


class TokenDecoder(Protocol):
    """The tokenizer interface that a text stream needs."""

    special_ids: frozenset[int]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens; invalid UTF-8 becomes U+FFFD."""

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token whose text is not its own, as a part of a character; nothing: its text's."""

    def fixed_text(self, token_id: int) -> str | None:
        """Return the text that a token adds after any text that ends with a complete character.

        None: the text depends on the neighbours, or the token is special.
        """


class IncrementalDecoder:
    """Decodes one token at a time, in O(1) tokens each, by decoding a sliding window and returning the new text.

    A token with a fixed text after a complete character needs no decoding: it makes a window of its own.

    The window keeps some tokens whose text was returned already, as in TGI and vLLM, since a token's text depends on
    its predecessors (leading spaces, bytes of one character). `_returned` is the returned part of the window's text.
    """

    def __init__(self, tokenizer: TokenDecoder, *, skip_special_tokens: bool, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._window = [token_id for token_id in context if token_id not in self._skipped]
        self._returned = self._decode(self._window) if self._window else ""
        if not self._returned or self._returned.endswith(_REPLACEMENT):
            self._window, self._returned = [], ""
        self._num_complete = len(self._window)
        """Number of tokens at the window's start after which the last character was complete."""
        self._limit = _MAX_WINDOW
        self._is_complete = bool(self._returned)
        """Whether the text so far is not empty, so that no leading space can go, and ends with a complete character."""
        self._fixed_id: int | None = None
        """The newest token, if it had a fixed text; it takes the place of the window."""

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that it completes, which may be empty."""
        if token_id in self._skipped:
            return ""
        if self._is_complete:
            fixed = self._tokenizer.fixed_text(token_id)
            if fixed is not None:
                self._fixed_id = token_id
                return fixed
            self._open_window()
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.startswith(self._returned):
            # A byte-fallback tokenizer decodes a whole run of bytes as U+FFFD while its last character is incomplete.
            if len(self._window) - self._num_complete <= _MAX_PENDING_TOKENS:
                self._is_complete = False
                return ""
            text = self._restart()
        return self._take_new(text)

    def flush(self) -> str:
        """Return the remaining text; an incomplete character becomes U+FFFD."""
        if self._is_complete:
            return ""
        text = self._decode(self._window)
        if not text.startswith(self._returned):
            text = self._restart()
        rest = text[len(self._returned) :]
        self._returned = text
        return rest

    def _take_new(self, text: str) -> str:
        """Return the new and final part of the window's text; move the window on."""
        fresh = text[len(self._returned) :]
        ready = fresh.rstrip(_REPLACEMENT)
        num_pending = len(fresh) - len(ready)
        if ready or not num_pending:
            self._num_complete = len(self._window)
        elif len(self._window) - self._num_complete > _MAX_PENDING_TOKENS and num_pending > _MAX_PENDING_CHARS:
            num_pending = _MAX_PENDING_CHARS
            ready = fresh[:-num_pending]
        self._returned += ready
        if len(self._window) > self._limit:
            self._move_on(text, num_pending)
        self._is_complete = bool(self._returned) and not num_pending
        return ready

    def _open_window(self) -> None:
        """Begin the window at the newest token, if its text was fixed."""
        if self._fixed_id is not None:
            self._window, self._fixed_id = [self._fixed_id], None
            self._returned, self._num_complete, self._limit = self._decode(self._window), 1, _MAX_WINDOW

    def _move_on(self, text: str, num_pending: int) -> None:
        """Drop tokens from the window's front, at a position where the rest decodes to the same text."""
        for length in _TAIL_LENGTHS:
            tail = self._window[-length:]
            tail_text = self._decode(tail)
            if len(tail_text) > num_pending and text.endswith(tail_text):
                self._num_complete = max(0, self._num_complete - (len(self._window) - length))
                self._window = tail
                self._returned = tail_text[: len(tail_text) - num_pending]
                self._limit = _MAX_WINDOW
                return
        self._limit = len(self._window) + _MAX_WINDOW

    def _restart(self) -> str:
        """Start the window after the last complete character; returns its text."""
        self._window = self._window[self._num_complete :]
        self._num_complete = 0
        self._returned = ""
        return self._decode(self._window)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class StoppedText:
    """The text of one sample (see ports.TextStream), truncated at the first stop string.

    Among several stop strings the one that starts first wins, then the one listed first. As in vLLM, a match must be
    completed by a token after the first `min_tokens`. Tokens are processed one by one, so the result does not depend
    on how many arrive at once. `context`: the prompt's last tokens, which determine a leading space.
    """

    __slots__ = (
        "_decoder",
        "_finished",
        "_held",
        "_include_stop",
        "_min_match_end",
        "_min_tokens",
        "_prefix_lens",
        "_stop",
        "_tokenizer",
        "text",
        "text_ends",
        "token_ends",
    )

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
        self.token_ends = [] if stop else self.text_ends
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens, context=context)
        self._stop = tuple(stop)
        self._prefix_lens = [0] * len(stop)
        """Length of the proper prefix of each stop string that the text ends with; the longest is held back."""
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._held = ""
        self._min_match_end = 0
        """Length of the text of the first `min_tokens` tokens, in code points; a match must end after it."""
        self._finished = False

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> StopMatch | None:
        """Add tokens; returns the match of a stop string, if they complete one. Tokens after it are ignored."""
        if not (self._stop or ends_with_stop_token):
            self._push_all(token_ids)
            return None
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            silent = ends_with_stop_token and index == last and not self._include_stop
            piece = "" if silent else self._decoder.push(token_id)
            stop_string = self._take(piece) if piece else None
            self.text_ends.append(len(self.text))
            if self._stop:
                self.token_ends.append(len(self.text) + len(self._held))
            if stop_string is not None:
                self._finished = True
                self._cut_token_ends()
                return StopMatch(stop_string, len(self.text_ends))
        return None

    def _push_all(self, token_ids: Sequence[int]) -> None:
        """Add tokens that no stop string can end: what nearly every token of a step is."""
        push, ends = self._decoder.push, self.text_ends
        # As in `_release`.
        text, self.text = self.text, ""
        for token_id in token_ids:
            text += push(token_id)
            ends.append(len(text))
        self.text = text

    def finish(self) -> None:
        """Release the text that was held back; nothing after a stop string."""
        if not self._finished:
            self._finished = True
            self._release(self._held + self._decoder.flush())
            self._held = ""

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token."""
        return self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token whose text is not its own; nothing: its text's."""
        return self._tokenizer.token_bytes(token_id)

    def _cut_token_ends(self) -> None:
        """Let the tokens of a stop string end where the text does, as the last one does."""
        end, index = len(self.text), len(self.token_ends) - 2
        while index >= 0 and self.token_ends[index] > end:
            self.token_ends[index] = end
            index -= 1

    def _take(self, piece: str) -> str | None:
        """Add text; returns the stop string that it completes, if any."""
        if not self._stop:
            self._release(piece)
            return None
        text = self._held + piece
        if len(self.text_ends) < self._min_tokens:
            self._min_match_end = len(self.text) + len(text)
        else:
            found = self._find(text)
            if found is not None:
                start, stop_string = found
                self._release(text[: start + len(stop_string)] if self._include_stop else text[:start])
                self._held = ""
                return stop_string
        # A prefix grows by the new text at most: this limit makes the cost of a push independent of the held text.
        self._prefix_lens = [
            _overlap(text, stop_string, prefix_len + len(piece))
            for stop_string, prefix_len in zip(self._stop, self._prefix_lens, strict=True)
        ]
        num_held = max(self._prefix_lens)
        self._held = text[len(text) - num_held :]
        self._release(text[: len(text) - num_held])
        return None

    def _find(self, text: str) -> tuple[int, str] | None:
        """Return the start of the first stop string in the text, and the string."""
        best: tuple[int, str] | None = None
        floor = self._min_match_end - len(self.text)
        for stop_string in self._stop:
            start = text.find(stop_string, max(0, floor + 1 - len(stop_string)))
            if start >= 0 and (best is None or start < best[0]):
                best = start, stop_string
        return best

    def _release(self, piece: str) -> None:
        # With a single reference CPython appends in place; `self.text += piece` would copy all text for each token.
        text = self.text
        self.text = ""
        text += piece
        self.text = text


def _overlap(text: str, stop_string: str, limit: int) -> int:
    """Return the length of the longest suffix of `text`, up to `limit`, that is a proper prefix of `stop_string`."""
    longest = min(limit, len(stop_string) - 1)
    if stop_string[0] not in text[len(text) - longest :]:
        return 0
    for length in range(longest, 0, -1):
        if text.endswith(stop_string[:length]):
            return length
    return 0
