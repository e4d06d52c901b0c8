"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from cadenza.outputs import CompletionOutput, RequestOutput
from gateway_svc.answering import answer_chat
from gateway_svc.anthropic.content import ContentBlocks
from gateway_svc.http.errors import ApiError, anthropic_body
from gateway_svc.http.sending import named_event
from gateway_svc.models import check_model
from gateway_svc.openai.usage import completion_tokens, prompt_tokens
from gateway_svc.parsing.output import OutputParser, Reading
from gateway_svc.parsing.parts import Content, Part
from gateway_svc.requests.messages import read_count, read_messages
from gateway_svc.requests.request import GatewayRequest
from gateway_svc.scheduler.generation import Generation
from gateway_svc.scheduler.inbox import Taken
from gateway_svc.state import STATE


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    return await answer_chat(request, read_messages, _Message)


async def count_tokens(request: web.Request) -> web.Response:
    """The number of a conversation's tokens, as a prompt."""
    asked, state, caller = await request.app[STATE].asked(request, read_count, generates=False)
    await check_model(state.names, asked.model, caller)
    return web.json_response({"input_tokens": len(await caller.tokenize(asked.prompt))})


@dataclass(frozen=True, slots=True)
class _Message:
    """The answer to one request."""

    request: GatewayRequest
    reading: Reading
    model: str

    def object(self, content: list[Any], stop: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        """The message."""
        return {
            "id": self.request.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **stop,
            "usage": usage,
        }

    def content(self) -> ContentBlocks:
        """Where its output is put together."""
        return ContentBlocks(self.reading.formats, shows_thought=self.request.shows_thought)

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """The message at its end."""
        (result,) = results
        (sample,) = result.outputs
        content = self.content()
        for _ in [*content.add(self._parts(result, sample)), *content.finish()]:
            pass  # the events of a stream
        stop = _stop(sample, has_calls=content.has_calls)
        return self.object(content.blocks, stop, _usage(result, completion_tokens(result)))

    def events(self, generation: Generation) -> _MessageEvents:
        """The message as a stream."""
        return _MessageEvents(self, generation)

    def _parts(self, result: RequestOutput, sample: CompletionOutput) -> Sequence[Part]:
        if self.reading.is_plain:
            return [Content(sample.text)]
        return OutputParser(self.reading, result.prompt_token_ids or []).feed(sample)


def _stop(sample: CompletionOutput, *, has_calls: bool) -> dict[str, Any]:
    """Why a message ends, in Anthropic's words."""
    if sample.finish_detail == "stop_string":
        return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_reason}
    if has_calls and sample.finish_reason == "stop":
        return {"stop_reason": "tool_use", "stop_sequence": None}
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


class _MessageEvents:
    """The events of a streamed message."""

    def __init__(self, read: _Message, generation: Generation) -> None:
        self._read = read
        self._generation = generation
        self._content = read.content()
        self._parser: OutputParser | None = None

    def begin(self) -> bytes:
        """The events before the first text."""
        (result,) = self._generation.totals()
        usage = _usage(RequestOutput(result.request_id, prompt_token_ids=result.prompt_token_ids), 0)
        message = self._read.object([], {"stop_reason": None, "stop_sequence": None}, usage)
        started = named_event({"type": "message_start", "message": message})
        return started + _events(self._content.open_text()) if self._read.reading.is_plain else started

    def deltas(self, taken: Taken) -> bytes:
        """The events of new text."""
        return b"".join(
            _events(self._content.add(self._parts(prompt, sample)))
            for prompt, delta in taken
            for sample in delta.outputs
        )

    def failed(self, error: ApiError) -> bytes:
        """The event of a message that fails after its beginning."""
        return named_event(anthropic_body(error))

    def end(self) -> bytes:
        """The events after the last text."""
        (result,) = self._generation.totals()
        (sample,) = result.outputs
        ended = _events(self._content.finish())
        stop = _stop(sample, has_calls=self._content.has_calls)
        usage = _usage(result, completion_tokens(result))
        return b"".join(
            (
                ended,
                named_event({"type": "message_delta", "delta": stop, "usage": usage}),
                named_event({"type": "message_stop"}),
            )
        )

    def _parts(self, prompt: int, sample: CompletionOutput) -> Sequence[Part]:
        if self._read.reading.is_plain:
            return [Content(sample.text)] if sample.text else []
        if self._parser is None:
            self._parser = OutputParser(self._read.reading, self._generation.prompt_token_ids(prompt))
        return self._parser.feed(sample)


def _events(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(map(named_event, events))
