"""The content of a message's answer: thinking, text and tool_use blocks, and the events of their coming."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from gateway_svc.openai.chat_message import call_id
from gateway_svc.parsing.formats import Formats
from gateway_svc.parsing.parts import CallArguments, CallBegin, Content, Part, Thought
from gateway_svc.requests.messages import INVALID_JSON

Event = dict[str, Any]


class ContentBlocks:
    """Makes blocks of the parts of an output, one after the other. Only the last one is open."""

    def __init__(self, formats: Formats, *, shows_thought: bool) -> None:
        self._formats = formats
        self._shows_thought = shows_thought
        self._is_open = False
        self._arguments = ""
        """Of the call at hand."""
        self.blocks: list[dict[str, Any]] = []
        self.has_calls = False

    def add(self, parts: Sequence[Part]) -> Iterator[Event]:
        """Add the parts of a delta."""
        for part in parts:
            match part:
                case Thought(text):
                    if self._shows_thought:
                        yield from self._text("thinking", text, {"type": "thinking", "thinking": "", "signature": ""})
                case Content(text):
                    yield from self._text("text", text, {"type": "text", "text": ""})
                case CallBegin(_, name):
                    self.has_calls = True
                    block = {"type": "tool_use", "id": call_id(self._formats, "toolu_"), "name": name, "input": {}}
                    yield from self._open(block)
                case CallArguments(_, text):
                    self._arguments += text
                    yield self._delta({"type": "input_json_delta", "partial_json": text})

    def open_text(self) -> Iterator[Event]:
        """Begin the text, before it comes."""
        yield from self._open({"type": "text", "text": ""})

    def finish(self) -> Iterator[Event]:
        """End the last block. Without any there is a text that is empty."""
        if not self.blocks:
            yield from self.open_text()
        yield from self._close()

    def _text(self, kind: str, text: str, block: dict[str, Any]) -> Iterator[Event]:
        if not self._is_open or self.blocks[-1]["type"] != kind:
            yield from self._open(block)
        self.blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._is_open, self._arguments = True, ""
        self.blocks.append(block)
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _close(self) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        block = self.blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        elif block["type"] == "thinking":  # clients forget a thought without one, and send others back
            block["signature"] = uuid.uuid4().hex
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _object(arguments: str) -> Any:
    """The arguments of a call. Those that are cut or wrong are a text, under the key that Anthropic names for them.

    See https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/fine-grained-tool-streaming.
    """
    try:
        return json.loads(arguments or "{}", strict=False, parse_constant=_no_json)  # models write raw line breaks
    except (ValueError, RecursionError):
        return {INVALID_JSON: arguments}


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
