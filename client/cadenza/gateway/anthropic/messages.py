"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from cadenza.gateway.anthropic.blocks import messages_prompt
from cadenza.gateway.fields.field import read_fields
from cadenza.gateway.fields.sampling import require, sampling_params
from cadenza.gateway.fields.tables import COUNT_TOKENS, MESSAGES
from cadenza.gateway.http.errors import ApiError, anthropic_body
from cadenza.gateway.http.events import named_event
from cadenza.gateway.http.reading import read_object
from cadenza.gateway.models import check_model
from cadenza.gateway.openai.failures import whole
from cadenza.gateway.openai.streaming import stream_answer
from cadenza.gateway.openai.usage import completion_tokens, prompt_tokens
from cadenza.gateway.scheduler.generation import Generation, Job
from cadenza.gateway.scheduler.inbox import Taken
from cadenza.gateway.state import STATE
from cadenza.outputs import CompletionOutput, RequestOutput

_RENAMED = {"stop": "stop_sequences"}


@dataclass(frozen=True, slots=True)
class _Message:
    """One answer."""

    id: str
    model: str

    def object(self, content: list[Any], stop: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        """The message."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **stop,
            "usage": usage,
        }


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    state = request.app[STATE]
    caller = await state.generating(request)
    values = read_fields(MESSAGES, await read_object(request))
    require(values, "messages")
    max_tokens = require(values, "max_tokens")
    prompt = messages_prompt(values)
    chosen = state.names.choose(values.get("model"), await caller.model())
    params = sampling_params(values, _RENAMED, max_tokens=max_tokens, stop=values.get("stop_sequences", []))
    read = _Message(f"msg_{uuid.uuid4().hex}", chosen.name)
    generation = Generation(caller, Job([prompt], params, chosen.adapter), is_streamed=bool(values.get("stream")))
    async with generation:
        if values.get("stream"):
            events = _MessageEvents(read, generation)
            return await stream_answer(
                request,
                generation,
                begin=events.begin,
                events_of=events.deltas,
                end=events.end,
                failed=_failed,
            )
        (result,) = whole(await generation.results())
    (sample,) = result.outputs
    content = [{"type": "text", "text": sample.text}]
    return web.json_response(read.object(content, _stop(sample), _usage(result, completion_tokens(result))))


async def count_tokens(request: web.Request) -> web.Response:
    """The number of a conversation's tokens, as a prompt."""
    state = request.app[STATE]
    caller = await state.caller(request)
    values = read_fields(COUNT_TOKENS, await read_object(request))
    require(values, "messages")
    prompt = messages_prompt(values)
    await check_model(state.names, values.get("model"), caller)
    return web.json_response({"input_tokens": len(await caller.tokenize(prompt))})


def _stop(sample: CompletionOutput) -> dict[str, Any]:
    """Why a message ends, in Anthropic's words."""
    if sample.finish_detail == "stop_string":
        return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_reason}
    reason = {"stop": "end_turn", "length": "max_tokens"}.get(sample.finish_reason or "", "refusal")
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(result: RequestOutput, num_output_tokens: int) -> dict[str, Any]:
    num_cached = result.num_cached_tokens or 0
    return {
        "input_tokens": prompt_tokens(result) - num_cached,
        "output_tokens": num_output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
    }


def _failed(error: ApiError) -> bytes:
    return named_event(anthropic_body(error))


class _MessageEvents:
    """The events of a streamed message."""

    def __init__(self, read: _Message, generation: Generation) -> None:
        self._read = read
        self._generation = generation

    def begin(self) -> bytes:
        """The events before the first text."""
        (result,) = self._generation.totals()
        usage = _usage(RequestOutput(result.request_id, prompt_token_ids=result.prompt_token_ids), 0)
        message = self._read.object([], {"stop_reason": None, "stop_sequence": None}, usage)
        block = {"type": "text", "text": ""}
        return named_event({"type": "message_start", "message": message}) + named_event(
            {"type": "content_block_start", "index": 0, "content_block": block}
        )

    def deltas(self, taken: Taken) -> bytes:
        """The events of new text."""
        return b"".join(
            named_event(
                {
                    "type": "content_block_delta",
                    "index": 0,
                    "delta": {"type": "text_delta", "text": sample.text},
                }
            )
            for _, delta in taken
            for sample in delta.outputs
            if sample.text
        )

    def end(self) -> bytes:
        """The events after the last text."""
        (result,) = self._generation.totals()
        (sample,) = result.outputs
        usage = _usage(result, completion_tokens(result))
        return b"".join(
            (
                named_event({"type": "content_block_stop", "index": 0}),
                named_event({"type": "message_delta", "delta": _stop(sample), "usage": usage}),
                named_event({"type": "message_stop"}),
            )
        )
