"""Reads the calls of an answer, piece by piece, in the ways of one format; what is no call is content, whole."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from cadenza_common.call_formats.syntax import Body, CallSyntax, ToolSyntax
from gateway_svc.parsing.arguments.readers import CallArgumentsReader, JsonArguments, ObjectCall, PythonCall
from gateway_svc.parsing.arguments.tagged import ArgumentKinds, TagArguments, TagSyntax
from gateway_svc.parsing.arguments.tree import TreeArguments
from gateway_svc.parsing.call_json import MAX_NAME
from gateway_svc.parsing.calls import CLOSING, AnswerBuilder
from gateway_svc.parsing.literals import FAIL, MORE, Codes, Header, Literal, keyed
from gateway_svc.parsing.parts import Mark, Marker, Part, Piece


class _CallState(Enum):
    CONTENT = "content"
    CALL = "in a call"
    BEHIND = "behind a call"


_NOTHING = Literal("")


@dataclass(frozen=True, slots=True)
class _Beginning:
    """A text that begins a call."""

    way: _Way
    literal: Literal
    is_known: bool
    """Whether the name must be a tool's."""
    is_first: bool = False
    """Whether it does so at the start of an answer alone."""


class _Way:
    """One way to write calls, with its literals."""

    def __init__(self, way: CallSyntax, codes: Codes) -> None:
        self.syntax = way
        self.name = re.compile(way.name)
        self.separator = Header(way.header) if way.header else codes.literal(way.separator, spaced=True)
        self.call_open = codes.literal(way.call[0], spaced=True)
        self.call_close = codes.literal("" if way.body is Body.TREE else way.call[1]).atoms()
        self.section_close = codes.literal(way.section[1]).atoms()
        self.between = frozenset(way.between)
        outer = (*way.call, *way.section)
        self.tags = TagSyntax(way.tags, codes, outer) if way.tags is not None else None
        self.tree_end = codes.coded(way.call[1].strip()) if way.body is Body.TREE else ""
        self.quote = codes.literal(way.markers[-1]).begins if way.body is Body.TYPED else ""

    def beginnings(self, codes: Codes) -> Iterator[_Beginning]:
        """All that begin a call in content."""
        way = self.syntax
        if way.section[0]:
            yield _Beginning(self, codes.literal(way.open, spaced=True), way.is_known)
        if way.call[0] and (self.call_open.codes or not way.section[0]):
            yield _Beginning(self, self.call_open, way.is_known)
        if way.bare is not None:
            yield _Beginning(self, codes.literal(way.bare, spaced=True), True, is_first=not way.bare or way.is_known)


class CallReader:
    """Reads one answer."""

    def __init__(
        self, syntax: ToolSyntax, markers: Sequence[Marker], names: Collection[str], kinds: ArgumentKinds
    ) -> None:
        """markers: all that pieces have; names: of the tools; kinds: what their arguments are."""
        self._codes = Codes(markers)
        self._names, self._kinds = names, kinds
        self._answer = AnswerBuilder()
        ways = [_Way(way, self._codes) for way in syntax.ways]
        self._beginnings = [each for way in ways for each in way.beginnings(self._codes)]
        self._own = {self._codes.encode(Mark(each, "x", 0)) for each in markers if each.text in syntax.markers}
        begins = sorted({re.escape(each.literal.begins) for each in self._beginnings if each.literal.begins})
        self._candidates = re.compile("|".join(begins) or "(?!)")
        self._at = _CallState.CONTENT
        self._start = syntax.start
        self._text = ""
        """What has been read and is not certain."""
        self._is_first = True
        """Whether nothing but space has been read."""
        self._raw = ""
        """What is given back if it is no call."""
        self._way: _Way | None = None
        """Of the call at hand, or the last one."""
        self._call: CallArgumentsReader | None = None
        self._is_begun = False
        self._is_named = False
        """Whether the text has a tool's name that may become a call."""
        self._due: list[Literal] = []
        """What is to stand behind the call."""
        self._had_due = False
        self._holds = True
        """Whether a marker within a value may be its text."""
        self._is_cut = False
        """Whether the output has ended for its length."""

    @property
    def is_in_call(self) -> bool:
        """Whether what follows belongs to a call, or to what stands behind the name of one."""
        return self._at is _CallState.CALL or self._is_named

    def feed(self, piece: Piece) -> Iterator[Part]:
        """Take one piece; gives the parts that are certain now."""
        self._text += self._codes.encode(piece)
        yield from self._read(is_last=False)

    def finish(self, *, is_cut: bool) -> Iterator[Part]:
        """Give the rest; is_cut: the output has ended for its length, so that what has begun is no error."""
        self._is_cut = is_cut
        while True:
            yield from self._read(is_last=True)
            call = self._call
            if call is None:
                break
            used, arguments = call.end(keyed(self._text), is_cut=is_cut)
            yield from self._arguments(call, arguments)
            self._raw, self._text = self._raw + self._text[:used], self._text[used:]
            self._call, self._holds = None, False
            if call.is_call:
                self._go_behind()
            else:
                self._at = _CallState.CONTENT
                yield from self._answer.text(self._codes.shown(self._raw))
                self._raw = ""
            if not self._text:
                break
        yield from self._answer.finish()

    def _read(self, *, is_last: bool) -> Iterator[Part]:
        """Read as far as it is certain; is_last: nothing follows."""
        while self._text:
            self._is_named = False
            before = self._at, len(self._text), self._call
            match self._at:
                case _CallState.CONTENT:
                    yield from self._content(is_last=is_last)
                case _CallState.CALL:
                    yield from self._in_call()
                case _CallState.BEHIND:
                    yield from self._behind(is_last=is_last)
            if before == (self._at, len(self._text), self._call):
                return

    def _content(self, *, is_last: bool) -> Iterator[Part]:
        """Text up to what begins a call, or may begin one."""
        if self._is_first and self._start:
            if self._start != self._text and self._start.startswith(self._text) and not is_last:
                return
            self._text, self._start = self._text.removeprefix(self._start), ""
        text, at = keyed(self._text), 0
        start = len(text) - len(text.lstrip())
        while at < len(text):
            found = self._candidates.search(text, at)
            place = len(text) if found is None else found.start()
            if self._is_first and start < len(text) and start < place:
                place = start
            late = self._late(text, at, place)
            if late is not None:
                yield from self._show(late)
                self._take(1)
                return
            if place == len(text):
                break
            outcome = self._try(text, place, is_first=self._is_first and place == start, is_last=is_last)
            if outcome != FAIL:
                yield from self._show(place)
                if outcome != MORE:
                    self._raw, self._text = self._text[: outcome - place], self._text[outcome - place :]
                return
            self._is_first = False
            at = place + 1
        yield from self._show(len(text))

    def _late(self, text: str, start: int, end: int) -> int | None:
        """Where a marker is that closes the last call, behind other text."""
        for index, due in enumerate(self._due):
            place = text.find(due.begins, start, end + 1) if due.codes else -1
            if place >= 0:
                del self._due[: index + 1]
                return place
        return None

    def _show(self, num: int) -> Iterator[Part]:
        text = self._take(num)
        if not text.isspace():
            self._is_first = self._is_first and not text
        yield from self._answer.text(self._codes.shown(text))

    def _take(self, num: int) -> str:
        text, self._text = self._text[:num], self._text[num:]
        return text

    def _try(self, text: str, at: int, *, is_first: bool, is_last: bool) -> int:
        """Whether a call begins at this place of content: its end so far, MORE or FAIL."""
        outcome = FAIL
        for each in self._beginnings:
            if each.is_first and not is_first:
                continue
            if (end := self._begin(each, text, at)) >= 0:
                return end
            outcome = max(outcome, end)
        return FAIL if is_last else outcome

    def _begin(self, beginning: _Beginning, text: str, at: int) -> int:
        """Whether a call begins so; if so, it is read from the end that is returned."""
        end = beginning.literal.match(text, at)
        if end < 0:
            return end
        way = beginning.way
        while end < len(text) and text[end].isspace():
            end += 1
        if end == len(text):
            return MORE
        if way.syntax.body is Body.OBJECT:
            if text[end] != "{":
                return FAIL
            names = self._names if beginning.is_known else None
            self._enter(way, ObjectCall(way.syntax, self._codes, self._own, names))
            return end
        return self._begin_named(beginning, text, end)

    def _begin_named(self, beginning: _Beginning, text: str, at: int) -> int:
        way = beginning.way
        found = way.name.match(text, at)
        name = "" if found is None else found.group()
        if not name or len(name) > MAX_NAME:
            return FAIL
        if beginning.is_known and not any(
            each.startswith(name) if at + len(name) == len(text) else each == name for each in self._names
        ):
            return FAIL
        if at + len(name) == len(text):
            self._is_named = name in self._names
            return MORE
        end = way.separator.match(text, at + len(name))
        if end < 0:
            self._is_named = end == MORE
            return end
        if way.tags is not None:
            kinds = self._kinds.get(name, {})
            self._enter(way, TagArguments(name, way.tags, kinds, holds=self._holds))
        elif way.syntax.body is Body.TREE:
            self._enter(way, TreeArguments(name, way.tree_end, self._codes, self._kinds))
        elif way.syntax.body is Body.JSON:
            return self._begin_json(way, name, text, end)
        else:
            self._enter(way, PythonCall(name, self._codes, self._own, way.quote))
        return end

    def _begin_json(self, way: _Way, name: str, text: str, end: int) -> int:
        """An object behind a name; where the call is closed at once, it is empty."""
        while end < len(text) and text[end].isspace():
            end += 1
        if end == len(text):
            return MORE
        closing = way.call_close[0].match(text, end) if way.call_close else FAIL
        if text[end] != "{" and closing < 0:
            return closing
        self._enter(way, JsonArguments(name, self._codes, self._own, is_empty=text[end] != "{"))
        return end

    def _enter(self, way: _Way, call: CallArgumentsReader) -> None:
        self._at, self._way, self._call, self._is_begun = _CallState.CALL, way, call, False
        self._is_first = False

    def _in_call(self) -> Iterator[Part]:
        call = self._call
        assert call is not None
        used, arguments = call.feed(keyed(self._text))
        taken = self._take(used)
        self._raw += taken
        yield from self._arguments(call, arguments)
        if call.is_bad and not call.is_call:
            self._at, self._call = _CallState.CONTENT, None
            raw, self._raw = self._raw, ""
            yield from self._answer.text(self._codes.shown(raw))
        elif call.is_done:
            self._call = None
            self._go_behind()

    def _arguments(self, call: CallArgumentsReader, text: str) -> Iterator[Part]:
        if call.is_call:
            if not self._is_begun:
                self._is_begun, self._raw = True, ""
                yield from self._answer.begin(str(call.name))
            self._raw = ""
            yield from self._answer.arguments(text)

    def _go_behind(self) -> None:
        way = self._way
        assert way is not None
        self._at, self._raw = _CallState.BEHIND, ""
        self._due = [*way.call_close, *way.section_close]
        self._had_due = bool(self._due)

    def _behind(self, *, is_last: bool) -> Iterator[Part]:
        """What closes a call, and what stands between it and the next one; else content."""
        way, text = self._way, keyed(self._text)
        assert way is not None
        at = 0
        while at < len(text):
            # A call first: what begins it may begin what is due, too.
            if (next_call := self._next(way, text, at, is_last=is_last)) != FAIL:
                if next_call >= 0:
                    self._raw, self._text = self._text[:next_call], self._text[next_call:]
                return
            closed = self._closed(text, at, is_last=is_last)
            if closed == MORE:
                return
            if closed >= 0:
                self._take(closed)
                if self._had_due and not self._due:
                    self._at = _CallState.CONTENT
                return
            if not (text[at].isspace() or text[at] in CLOSING or text[at] in way.between):
                self._at = _CallState.CONTENT
                run = self._take(at)
                yield from self._answer.text("" if run.isspace() and way.tags is not None else self._codes.shown(run))
                return
            at += 1
        if is_last:
            self._take(at)

    def _closed(self, text: str, at: int, *, is_last: bool) -> int:
        """The end of a text that is due here, which is no longer; MORE or FAIL."""
        for index, due in enumerate(self._due):
            end = due.match(text, at)
            if end >= 0:
                del self._due[: index + 1]
                return end
            spelled = self._codes.spelled(due.begins)
            if end == MORE or (spelled.startswith(text[at:]) and len(spelled) > len(text) - at):
                if not is_last:
                    return MORE
                if self._is_cut:  # what closes the call was cut, and is no content
                    return len(text)
        return FAIL

    def _next(self, way: _Way, text: str, at: int, *, is_last: bool) -> int:
        """Whether the next call of a section begins here."""
        if not way.call_open.begins and way.syntax.body is Body.OBJECT and text[at] != "{":
            return FAIL
        # Some models write several objects between one pair of markers.
        is_within = way.syntax.body is Body.OBJECT and text[at] == "{" and len(self._due) > 0
        has_section = bool(way.syntax.section[0]) or way.syntax.bare == "" or is_within
        is_known = way.syntax.is_known
        outcome = FAIL
        opening = _NOTHING if is_within else way.call_open
        inner = [_Beginning(way, opening, is_known)] if has_section and not text[at].isspace() else []
        for each in [*inner, *(each for each in self._beginnings if not each.is_first)]:
            if (end := self._begin(each, text, at)) >= 0:
                return end
            outcome = max(outcome, end)
        return FAIL if is_last else outcome
