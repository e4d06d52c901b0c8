"""The output of /v1/responses: reasoning, messages and function calls as items, and the events of their coming."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from gateway_svc.openai.chat_message import call_id
from gateway_svc.parsing.formats import Formats
from gateway_svc.parsing.parts import CallArguments, CallBegin, Content, Part, Thought
from gateway_svc.requests.response_input import carried
from gateway_svc.requests.response_tools import input_of
from gateway_svc.requests.tools import Tool

Event = dict[str, Any]
"""Its type, and its fields but for the number."""


class ResponseItems:
    """Makes items of the parts of an output, one after the other. Only the last one is open."""

    def __init__(self, formats: Formats, tools: Sequence[Tool], *, shows_thought: bool, carries_thought: bool) -> None:
        """carries_thought: whether reasoning has encrypted_content."""
        self._formats = formats
        self._tools = {tool.name: tool for tool in tools}
        self._arguments = ""
        """Of the last item, if that is a call of a custom tool."""
        self._shows_thought = shows_thought
        self._carries_thought = carries_thought
        self._logprobs: list[dict[str, Any]] = []
        """Of all tokens."""
        self._is_open = False
        self.output: list[dict[str, Any]] = []

    def add(self, parts: Sequence[Part], logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """Add the parts of a delta; logprobs: of all its tokens. Content shows only its own tokens' logprobs."""
        self._logprobs += logprobs
        for part in parts:
            match part:
                case Thought(text):
                    if self._shows_thought:
                        yield from self._text("reasoning", text)
                case Content(text, tokens):
                    yield from self._text("message", text, tokens)
                case CallBegin(_, name):
                    yield from self._begin_call(name)
                case CallArguments(_, text):
                    if self.output[-1]["type"] == "custom_tool_call":  # its text is known once they end
                        self._arguments += text
                        continue
                    self.output[-1]["arguments"] += text
                    yield self._of_item("response.function_call_arguments.delta", delta=text)

    def open_message(self) -> Iterator[Event]:
        """Begin the message, before its text comes."""
        yield from self._open("message")

    def finish(self, *, is_cut: bool, tokens_behind: Sequence[int] = ()) -> Iterator[Event]:
        """End the last item; is_cut: it is not whole. Without any there is a message without text.

        tokens_behind: those behind all text, which are the message's if it is the last item.
        """
        if not self.output:
            yield from self._open("message")
        if self._logprobs and tokens_behind and self.output[-1]["type"] == "message":
            yield from self._text("message", "", tokens_behind)
        yield from self._close("incomplete" if is_cut else "completed")

    def _text(self, kind: str, text: str, tokens: Sequence[int] = ()) -> Iterator[Event]:
        """Text of a message or a thought."""
        if not self._is_open or self.output[-1]["type"] != kind:
            yield from self._open(kind)
        part = self.output[-1]["content"][0]
        part["text"] += text
        more: dict[str, Any] = {}
        if kind == "message":
            more["logprobs"] = [self._logprobs[token] for token in tokens] if self._logprobs else []
            part["logprobs"] += more["logprobs"]
        yield self._of_item(f"response.{part['type']}.delta", content_index=0, delta=text, **more)

    def _open(self, kind: str) -> Iterator[Event]:
        yield from self._close("completed")
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item: dict[str, Any] = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": []}
        yield from self._add_item({**item, "status": "in_progress", "content": []})
        self.output[-1]["content"].append(part)
        empty = {name: list(value) if isinstance(value, list) else value for name, value in part.items()}
        yield self._of_item("response.content_part.added", content_index=0, part=empty)

    def _begin_call(self, name: str) -> Iterator[Event]:
        yield from self._close("completed")
        tool, self._arguments = self._tools.get(name), ""
        is_custom = tool is not None and tool.custom is not None
        item = {
            "id": f"{'ctc' if is_custom else 'fc'}_{uuid.uuid4().hex}",
            "type": "custom_tool_call" if is_custom else "function_call",
            "status": "in_progress",
            "call_id": call_id(self._formats),
            "name": name if tool is None else tool.own_name,
            "input" if is_custom else "arguments": "",
        }
        if tool is not None and tool.namespace:
            item["namespace"] = tool.namespace
        yield from self._add_item(item)

    def _add_item(self, item: dict[str, Any]) -> Iterator[Event]:
        self.output.append(item)
        self._is_open = True
        shown = {**item, "content": []} if "content" in item else dict(item)
        yield {"type": "response.output_item.added", "output_index": len(self.output) - 1, "item": shown}

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item = self.output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._of_item("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        elif item["type"] == "custom_tool_call":
            item["input"] = input_of(self._arguments)
            yield self._of_item("response.custom_tool_call_input.delta", delta=item["input"])
            yield self._of_item("response.custom_tool_call_input.done", input=item["input"])
        else:
            (part,) = item["content"]
            text = {name: value for name, value in part.items() if name in ("text", "logprobs")}
            yield self._of_item(f"response.{part['type']}.done", content_index=0, **text)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
            if item["type"] == "reasoning" and self._carries_thought:
                item["encrypted_content"] = carried(part["text"])
        yield {"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": item}

    def _of_item(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **more}
