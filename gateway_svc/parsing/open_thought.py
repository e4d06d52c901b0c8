"""Calls at the end of a thought that is never closed.

Models that think write a call now and then without closing their thought before, and end; as often they write in a
thought what a call would be, and go on. So what begins with a call's marker is held back while it is nothing but calls:
if the output ends there they are calls, else it is the thought's text
(https://github.com/vllm-project/vllm/pull/35687).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from gateway_svc.parsing.call_reader import CallReader
from gateway_svc.parsing.parts import CallBegin, Content, Mark, Part, Piece, Role
from gateway_svc.parsing.pieces import num_begun


class OpenThought:
    """Reads the pieces of a thought that may have calls at its end."""

    def __init__(self, new_parser: Callable[[], CallReader], before: Collection[str]) -> None:
        """before: what stands before the marker of a call, as `<` where the token is `｜DSML｜`."""
        self._new_parser = new_parser
        self._before = sorted(filter(None, before))
        self._text = ""
        """What may stand there."""
        self._parser: CallReader | None = None
        self._held: list[Piece] = []
        self._parts: list[Part] = []
        """What the held pieces are, if they are calls."""
        self.num_tokens = 0
        """Tokens of the thought, if they are calls."""

    def feed(self, piece: Piece) -> list[Piece]:
        """Take a piece; returns those that are the thought's own."""
        if self._parser is None:
            text, self._text = self._text, ""
            if isinstance(piece, str):
                return self._own(text + piece)
            own: list[Piece] = [text] if text else []
            if piece.role is not Role.CALL:
                return [*own, piece]
            self._parser, self.num_tokens = self._new_parser(), max(0, piece.num_tokens - 1)
            self._held = own
            self._parts += self._parser.feed(text)
        self._held.append(piece)
        is_end = isinstance(piece, Mark) and piece.role is Role.THOUGHT_END
        if not is_end:
            self._parts += self._parser.feed(piece)
        if is_end or any(isinstance(part, Content) and part.text.strip() for part in self._parts):
            return self._release()
        return []

    def finish(self, *, is_cut: bool) -> tuple[list[Piece], list[Part]]:
        """Give what is held: the pieces as the thought's own, or the parts of calls."""
        if self._parser is None:
            return [self._text] if self._text else [], []
        self._parts += self._parser.finish(is_cut=is_cut)
        is_text = any(isinstance(part, Content) and part.text.strip() for part in self._parts)
        if is_cut or is_text or not any(isinstance(part, CallBegin) for part in self._parts):
            return self._release(), []
        return [], self._parts

    def _own(self, text: str) -> list[Piece]:
        """A text but for its end that may stand before a call's marker."""
        found = (each for each in self._before if text.endswith(each))
        size = max(map(len, found), default=num_begun(text, self._before) if self._before else 0)
        self._text = text[len(text) - size :]
        return [text[: len(text) - size]] if len(text) > size else []

    def _release(self) -> list[Piece]:
        held, self._held, self._parts, self._parser = self._held, [], [], None
        return held
