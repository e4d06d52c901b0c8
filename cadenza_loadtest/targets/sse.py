"""Parses server-sent events by the HTML standard: https://html.spec.whatwg.org/multipage/server-sent-events.html"""

from __future__ import annotations

import codecs
import re

_LINE_END = re.compile("\r\n|\n|\r")


class EventParser:
    """Turns bytes, in arbitrary chunks, into the data of events.

    Names, ids and retry times of events are not needed and ignored, as are comments.
    """

    def __init__(self) -> None:
        # A chunk may end within a character; "utf-8-sig" drops a byte order mark at the start.
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._rest = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that `chunk` completes."""
        text = self._rest + self._decoder.decode(chunk)
        # A CR at the end may be followed by the LF of the same line end.
        held = text.endswith("\r")
        *lines, self._rest = _LINE_END.split(text[:-1] if held else text)
        if held:
            self._rest += "\r"
        events: list[str] = []
        for line in lines:
            self._take(line, events)
        return events

    def _take(self, line: str, events: list[str]) -> None:
        if not line:
            if self._data:
                events.append("\n".join(self._data))
                self._data = []
            return
        name, _, value = line.partition(":")  # a comment's name is empty
        if name == "data":
            self._data.append(value.removeprefix(" "))
