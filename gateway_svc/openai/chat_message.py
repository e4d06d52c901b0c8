"""The message of a chat's answer, whole and in deltas, with its thought and tool calls."""

from __future__ import annotations

import secrets
import string
import uuid
from typing import Any

from cadenza.outputs import CompletionOutput
from gateway_svc.openai.usage import finish_of
from gateway_svc.parsing.formats import Formats
from gateway_svc.parsing.message import Message
from gateway_svc.parsing.parts import CallArguments, CallBegin, Content, Part, Thought

_SHORT_ID = string.ascii_letters + string.digits
_SHORT_ID_CHARS = 9


def call_id(formats: Formats, prefix: str = "call_") -> str:
    """An id for a call. Mistral's templates refuse others than theirs in the next request."""
    if formats.tools == "mistral":
        return "".join(secrets.choice(_SHORT_ID) for _ in range(_SHORT_ID_CHARS))
    return f"{prefix}{uuid.uuid4().hex[:24]}"


def message_object(message: Message, formats: Formats, *, before: Message, shows_thought: bool) -> dict[str, Any]:
    """The whole message; before: what its thought and its content begin with."""
    content, thought = message.content, message.thought
    if before.thought:
        thought = before.thought + (thought or "")
    if content is None and not message.calls and (thought is None or not shows_thought):
        content = ""
    if before.content:
        content = before.content + (content or "")
    found: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if thought is not None and shows_thought:
        found |= _thought(thought)
    if message.calls:
        found["tool_calls"] = [
            {
                "id": call_id(formats),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return found


def delta_object(part: Part, formats: Formats) -> dict[str, Any]:
    """A part as a delta."""
    match part:
        case Thought(text):
            return _thought(text)
        case Content(text):
            return {"content": text}
        case CallBegin(index, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id(formats), "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def finish_with_calls(sample: CompletionOutput, *, has_calls: bool) -> dict[str, Any]:
    """As `finish_of`, where an answer that ends by itself behind calls ends for them."""
    found = finish_of(sample)
    if has_calls and sample.finish_reason == "stop":
        found["finish_reason"] = "tool_calls"
    return found


def _thought(text: str) -> dict[str, Any]:
    """vLLM's newer name, and DeepSeek's, which older clients know."""
    return {"reasoning": text, "reasoning_content": text}
