"""Splits the reasoning off: the text between the markers of a thought, before the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from gateway_svc.parsing.parts import Mark, Piece, Role, Thought, shown_of


class _State(Enum):
    BEFORE = "before"
    OPEN = "open"
    DONE = "done"


class ReasoningSplitter:
    """Takes the thought out of the pieces of one output.

    It is there if the prompt has opened it, or if the output begins with its marker. A marker behind it is text, unless
    the format has thoughts there too.
    """

    def __init__(
        self,
        *,
        is_open: bool,
        is_past: bool = False,
        repeats: bool = False,
        answer: str = "",
        is_in_call: Callable[[], bool] = lambda: False,
    ) -> None:
        """is_open: whether the prompt ends within a thought; is_past: whether it ends within the answer behind one.

        repeats: whether thoughts stand behind text too, unless it belongs to a call, as is_in_call says. answer: the
        marker that begins an answer, and ends a thought that is open.
        """
        self._state = _State.OPEN if is_open else _State.DONE if is_past else _State.BEFORE
        self._repeats, self._is_in_call, self._answer = repeats, is_in_call, answer
        self._held: list[Piece] = []
        """Space and wrappers that the output begins with."""
        self._has_text = False
        self.num_tokens: int | None = 0
        """Tokens of the thought, with its markers; None: all so far, as it has not ended."""
        if is_open:
            self.num_tokens = None

    @property
    def is_open(self) -> bool:
        """Whether the output is within a thought."""
        return self._state is _State.OPEN

    def close(self, num_tokens: int) -> None:
        """The thought has ended without a marker of its own, with so many tokens."""
        self._state, self.num_tokens = _State.DONE, num_tokens

    def feed(self, piece: Piece) -> Iterator[Thought | Piece]:
        """Take one piece; gives the thought's text, and pieces of the answer, where markers of thoughts are text."""
        match self._state:
            case _State.BEFORE:
                yield from self._before(piece)
            case _State.OPEN:
                yield from self._open(piece)
            case _State.DONE if self._repeats and _begins(piece) and not self._is_in_call():
                self._state, self._has_text, self.num_tokens = _State.OPEN, False, None
            case _State.DONE:
                yield piece

    def finish(self) -> Iterator[Piece]:
        """Give the rest."""
        held, self._held = self._held, []
        yield from held

    def _before(self, piece: Piece) -> Iterator[Thought | Piece]:
        if _begins(piece):
            self._state, self._held, self.num_tokens = _State.OPEN, [], None
            return
        if isinstance(piece, Mark) and piece.role is Role.THOUGHT_END:  # of a thought that is left out
            self._state, self._held, self.num_tokens = _State.DONE, [], piece.num_tokens
            return
        self._held.append(piece)
        if not piece.strip() if isinstance(piece, str) else piece.marker.is_nothing:
            return
        self._state = _State.DONE
        yield from self.finish()

    def _open(self, piece: Piece) -> Iterator[Thought | Piece]:
        if isinstance(piece, Mark):
            if piece.marker.text == self._answer:
                self.close(piece.num_tokens)
                yield piece
                return
            if piece.role is Role.THOUGHT_END:
                self._state, self.num_tokens = _State.DONE, piece.num_tokens
                return
            if piece.role is Role.THOUGHT and not self._has_text:  # the prompt has it too
                return
        text = shown_of(piece)
        self._has_text = self._has_text or bool(text.strip())
        if text:
            yield Thought(text)


def _begins(piece: Piece) -> bool:
    return isinstance(piece, Mark) and piece.role is Role.THOUGHT


class Opening(Enum):
    """How a prompt ends."""

    OPEN = "within a thought"
    CLOSED = "behind a thought that is empty"
    MAYBE = "without either: the output may begin with a thought"
    ANSWERING = "within an answer, which the output continues"

    @property
    def is_past(self) -> bool:
        """Whether a thought, if there is one, has ended."""
        return self in (Opening.CLOSED, Opening.ANSWERING)


def opening_of_ids(prompt_ids: Sequence[int], start: int, end: int) -> Opening:
    """How a prompt ends, by the tokens of a thought's markers. Line breaks may follow them, in tokens of their own."""
    for token_id in reversed(prompt_ids[-3:]):
        if token_id == end:
            return Opening.CLOSED
        if token_id == start:
            return Opening.OPEN
    return Opening.MAYBE


def opening_of_text(tail: str, start: str, end: str) -> Opening:
    """The same, by the last text of a prompt."""
    tail = tail.rstrip()
    if tail.endswith(end.strip()):
        return Opening.CLOSED
    return Opening.OPEN if tail.endswith(start.strip()) else Opening.MAYBE


def opening_of_turn(content: str, start: str, end: str) -> Opening | None:
    """How a prompt ends whose last message, the assistant's, is continued; None: it has no text, and decides nothing.

    Its thought may be in its text, between the markers, or end there, where the template has opened it.
    """
    if end in content:
        return Opening.ANSWERING
    if content.lstrip().startswith(start.strip()):
        return Opening.OPEN
    return Opening.ANSWERING if content.strip() else None
