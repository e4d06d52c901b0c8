"""Reads an output of the model: its thought, its content and its tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from cadenza.outputs import CompletionOutput
from gateway_svc.parsing.answer_frame import AnswerFrame
from gateway_svc.parsing.arguments.tagged import ArgumentKinds
from gateway_svc.parsing.call_reader import CallReader
from gateway_svc.parsing.composing import MarkJoiner
from gateway_svc.parsing.formats import Formats
from gateway_svc.parsing.markers import pieces_and_composed
from gateway_svc.parsing.message import Message
from gateway_svc.parsing.open_thought import OpenThought
from gateway_svc.parsing.parts import (
    CallArguments,
    CallBegin,
    Content,
    Mark,
    Marker,
    Part,
    Piece,
    Role,
    Thought,
    shown_of,
)
from gateway_svc.parsing.pieces import PieceReader
from gateway_svc.parsing.reasoning import Opening, ReasoningSplitter, opening_of_ids
from gateway_svc.parsing.token_owners import TokenOwners


@dataclass(frozen=True, slots=True)
class Reading:
    """How the outputs of one request are read."""

    formats: Formats = field(default_factory=Formats)
    tools: tuple[str, ...] = ()
    """Names of the tools that may be called; empty: calls are text."""
    skips_special: bool = True
    """Whether texts are without special tokens."""
    opening: Opening | None = None
    """How the prompt ends; None: its token ids say."""
    has_calls_alone: bool = False
    """Whether the answer must be calls: then what one that is cut has begun with is no content."""
    is_parallel: bool = True
    """Whether calls behind the first one count; otherwise they are left out."""
    kinds: ArgumentKinds = field(default_factory=dict)
    """What arguments are, for formats whose text does not say."""

    @property
    def is_plain(self) -> bool:
        """Whether outputs are content as they are."""
        return self.formats.reasoning is None and not self.has_frame

    @property
    def has_calls(self) -> bool:
        """Whether there may be calls."""
        return bool(self.tools) and self.formats.tools is not None

    @property
    def has_frame(self) -> bool:
        """Whether there may be calls, or texts of their format around content."""
        syntax = self.formats.tool_syntax
        return self.has_calls or (syntax is not None and bool(syntax.start or syntax.wrappers))

    def is_open(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the output begins within a thought."""
        opening = self.opening
        if opening is None:
            start, end = (self.formats.marker(role).token_id for role in (Role.THOUGHT, Role.THOUGHT_END))
            known = start is not None and end is not None
            opening = opening_of_ids(prompt_ids, start or 0, end or 0) if known else Opening.MAYBE
        return opening is Opening.OPEN or (opening is Opening.MAYBE and self.formats.always_thinks)


def _call_reader(reading: Reading, markers: Sequence[Marker]) -> CallReader:
    syntax = reading.formats.tool_syntax
    assert syntax is not None
    return CallReader(syntax, markers, frozenset(reading.tools), reading.kinds)


class OutputParser:
    """Reads one output, in deltas of any size: joined, its parts are the same for every cut."""

    def __init__(self, reading: Reading, prompt_ids: Sequence[int], *, with_tokens: bool = False) -> None:
        """prompt_ids: the prompt's token ids, of which the last ones say whether a thought is open.

        with_tokens: whether content says which tokens made it.
        """
        formats = reading.formats
        known = formats.markers if reading.has_frame else formats.reasoning_markers
        markers, composed = pieces_and_composed(known)
        self._reader = PieceReader(markers, skips_special=reading.skips_special)
        self._joiner = MarkJoiner(markers, composed) if composed else None
        self._calls = _call_reader(reading, known) if reading.has_frame else None
        thought = formats.thought_syntax
        self._thought = (
            None
            if thought is None
            else ReasoningSplitter(
                is_open=reading.is_open(prompt_ids),
                is_past=reading.opening is Opening.ANSWERING,
                repeats=thought.repeats,
                answer=thought.content[0],
                is_in_call=lambda: self._calls is not None and self._calls.is_in_call,
            )
        )
        has_open = self._calls is not None and thought is not None and not thought.repeats
        tools = formats.tool_syntax
        before = {way.open.partition(way.markers[0])[0] for way in tools.ways} if tools is not None else set()
        self._open_thought = OpenThought(lambda: _call_reader(reading, known), before) if has_open else None
        self._frame = AnswerFrame(*thought.answer) if thought is not None and any(thought.answer) else None
        self._is_parallel, self._has_calls_alone = reading.is_parallel, reading.has_calls_alone
        self._has_no_content = False
        """Whether what is left is the beginning of a call, which has no content beside it."""
        self._owners = TokenOwners(self._reader.text_ends) if with_tokens else None
        self.has_calls = False
        """Whether there has been a call."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the thought so far, with its markers."""
        if self._thought is None:
            return 0
        known = self._thought.num_tokens
        return self._reader.num_tokens if known is None else known

    def feed(self, delta: CompletionOutput) -> list[Part]:
        """Take the next delta, which may be the last one; returns the parts that are certain now."""
        pieces = self._reader.feed(delta.text, delta.token_ids, delta.text_ends)
        is_cut = delta.finished() and delta.finish_reason != "stop"
        self._has_no_content = is_cut and self._has_calls_alone
        if delta.finished():
            pieces += self._reader.finish()
        parts: list[Part] = []
        for piece in pieces:
            for each in (piece,) if self._owners is None else self._owners.split(piece):
                for whole in (each,) if self._joiner is None else self._joiner.feed(each):
                    self._take(whole, parts)
        if delta.finished():
            for whole in () if self._joiner is None else self._joiner.finish():
                self._take(whole, parts)
            self._end_open_thought(parts, is_cut=is_cut)
            for rest in () if self._thought is None else self._thought.finish():
                self._answer(rest, parts)
            if self._calls is not None:
                self._add_all(iter([*self._calls.finish(is_cut=is_cut)]), parts)
            for part in () if self._frame is None else self._frame.finish():
                self._add(part, parts)
        return _joined(parts)

    def tokens_behind(self) -> tuple[int, ...]:
        """The last tokens of an ended output. No part claims them: they made none of its text."""
        return () if self._owners is None else self._owners.rest()

    def _take(self, piece: Piece, parts: list[Part]) -> None:
        if self._thought is None:
            self._answer(piece, parts)
        elif self._open_thought is not None and self._thought.is_open:
            for own in self._open_thought.feed(piece):
                self._think(own, parts)
        else:
            self._think(piece, parts)

    def _think(self, piece: Piece, parts: list[Part]) -> None:
        for each in () if self._thought is None else self._thought.feed(piece):
            if isinstance(each, Thought):
                self._add(each, parts)
            else:
                self._answer(each, parts)

    def _end_open_thought(self, parts: list[Part], *, is_cut: bool) -> None:
        """The output ends, perhaps with calls in a thought that was never closed."""
        if self._open_thought is None or self._thought is None:
            return
        pieces, calls = self._open_thought.finish(is_cut=is_cut)
        for piece in pieces:
            self._think(piece, parts)
        if calls:
            self._thought.close(self._open_thought.num_tokens)
            self._add_all(iter(calls), parts)

    def _answer(self, piece: Piece, parts: list[Part]) -> None:
        if self._calls is not None:
            self._add_all(self._calls.feed(piece), parts)
        elif (text := shown_of(piece)) and not (isinstance(piece, Mark) and piece.marker.is_nothing):
            self._add_all(iter((Content(text),)), parts)

    def _add_all(self, found: Iterator[Part], parts: list[Part]) -> None:
        for part in found:
            if isinstance(part, CallBegin | CallArguments) and part.index and not self._is_parallel:
                continue
            if self._has_no_content and isinstance(part, Content):
                continue
            self.has_calls = self.has_calls or isinstance(part, CallBegin)
            for each in (part,) if self._frame is None else self._frame.feed(part):
                self._add(each, parts)

    def _add(self, part: Part, parts: list[Part]) -> None:
        if self._owners is None:
            parts.append(part)
        elif isinstance(part, Content):
            parts.append(Content(part.text, self._owners.of_content(part.text)))
        else:
            self._owners.of_others()
            parts.append(part)


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Join each part with the parts that continue it."""
    found: list[Part] = []
    for _, group in groupby(parts, _key):
        first, *others = group
        if not others or isinstance(first, CallBegin):
            found += [first, *others]
            continue
        same = [first, *others]
        text = "".join(part.text for part in same if not isinstance(part, CallBegin))
        match first:
            case Thought():
                found.append(Thought(text))
            case Content():
                tokens = [token for part in same if isinstance(part, Content) for token in part.tokens]
                found.append(Content(text, tuple(tokens)))
            case CallArguments(index):
                found.append(CallArguments(index, text))
    return found


def _key(part: Part) -> tuple[type[Part], int]:
    return type(part), part.index if isinstance(part, CallBegin | CallArguments) else 0


def read_output(reading: Reading, output: CompletionOutput, prompt_ids: Sequence[int]) -> Message:
    """Read a whole output."""
    if reading.is_plain:
        return Message(content=output.text)
    parser, message = OutputParser(reading, prompt_ids), Message()
    message.add(parser.feed(output))
    message.num_reasoning_tokens = parser.num_reasoning_tokens
    return message
