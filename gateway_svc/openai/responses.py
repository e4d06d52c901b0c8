"""POST /v1/responses, of which nothing is stored, and /v1/responses/input_tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from cadenza.outputs import CompletionOutput, RequestOutput
from gateway_svc.answering import answer_chat
from gateway_svc.http.errors import ApiError, openai_body
from gateway_svc.http.sending import named_event
from gateway_svc.models import check_model
from gateway_svc.openai.logprobs import TokenNames, chat_logprobs
from gateway_svc.openai.response_items import ResponseItems
from gateway_svc.openai.usage import completion_tokens, prompt_tokens
from gateway_svc.parsing.output import OutputParser, Reading
from gateway_svc.parsing.parts import Content, Part
from gateway_svc.requests.request import ResponsesRequest
from gateway_svc.requests.responses import read_input, read_response
from gateway_svc.scheduler.generation import Generation
from gateway_svc.scheduler.inbox import Taken
from gateway_svc.state import STATE


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer an input."""
    return await answer_chat(request, read_response, _Response)


async def input_tokens(request: web.Request) -> web.Response:
    """The number of an input's tokens, as a prompt."""
    asked, state, caller = await request.app[STATE].asked(request, read_input, generates=False)
    await check_model(state.names, asked.model, caller)
    count = len(await caller.tokenize(asked.prompt))
    return web.json_response({"object": "response.input_tokens", "input_tokens": count})


@dataclass(frozen=True, slots=True)
class _Response:
    """The answer to one request."""

    request: ResponsesRequest
    reading: Reading
    model: str
    created: float = field(default_factory=time.time)

    @property
    def is_plain(self) -> bool:
        """Whether outputs are content as they are, and nobody asks which token made it."""
        return self.reading.is_plain and not self.request.splits_logprobs

    def parser(self, prompt_ids: Sequence[int]) -> OutputParser:
        """A reader of its output."""
        return OutputParser(self.reading, prompt_ids, with_tokens=self.request.splits_logprobs)

    def items(self) -> ResponseItems:
        """Where its output is put together."""
        return ResponseItems(
            self.reading.formats,
            self.request.use.tools,
            shows_thought=self.request.shows_thought,
            carries_thought=self.request.carries_thought,
        )

    def object(self, status: str, output: list[Any], **more: Any) -> dict[str, Any]:
        """The response in a state."""
        given = self.request
        return {
            "id": given.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "max_tool_calls": None,
            "metadata": given.metadata,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": given.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": given.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None, **given.reasoning},
            "service_tier": "default",
            "store": False,
            "temperature": given.params.temperature,
            "text": {"format": given.text_format.as_object()},
            "tool_choice": given.use.choice_object(),
            "tools": given.use.objects(),
            "top_logprobs": given.num_top or 0,
            "top_p": given.params.top_p,
            "truncation": given.truncation,
            "usage": None,
            "user": given.user,
            "safety_identifier": given.safety_identifier,
            "presence_penalty": given.params.presence_penalty,
            "frequency_penalty": given.params.frequency_penalty,
            **more,
        }

    def logprobs(self, sample: CompletionOutput) -> list[dict[str, Any]]:
        """The logprobs of a sample's tokens; none if they are not wanted."""
        if self.request.num_top is None:
            return []
        return chat_logprobs(sample.logprobs or [], sample.token_ids, self.request.num_top, TokenNames())

    def ended(self, result: RequestOutput, output: list[Any], num_reasoning: int) -> dict[str, Any]:
        """The response at its end."""
        (sample,) = result.outputs
        is_cut = sample.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        more: dict[str, Any] = {"usage": _usage(result, num_reasoning)}
        if is_cut:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            more["completed_at"] = time.time()
        return self.object(status, output, **more)

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response as one object."""
        (result,) = results
        (sample,) = result.outputs
        items = self.items()
        parser = self.parser(result.prompt_token_ids or [])
        parts = [Content(sample.text)] if self.is_plain else parser.feed(sample)
        is_cut = sample.finish_reason == "length"
        added = items.add(parts, self.logprobs(sample))
        for _ in [*added, *items.finish(is_cut=is_cut, tokens_behind=parser.tokens_behind())]:
            pass  # the events of a stream
        return self.ended(result, items.output, parser.num_reasoning_tokens)

    def events(self, generation: Generation) -> _ResponseEvents:
        """The response as a stream."""
        return _ResponseEvents(self, generation)


def _usage(result: RequestOutput, num_reasoning: int) -> dict[str, Any]:
    num_input, num_output = prompt_tokens(result), completion_tokens(result)
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": result.num_cached_tokens or 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": num_input + num_output,
    }


class _ResponseEvents:
    """The events of a streamed response, numbered."""

    def __init__(self, read: _Response, generation: Generation) -> None:
        self._read = read
        self._generation = generation
        self._number = 0
        self._items = read.items()
        self._parser: OutputParser | None = None

    def begin(self) -> bytes:
        """The events before the first text."""
        started = self._read.object("in_progress", [])
        events = [
            self._event({"type": "response.created", "response": started}),
            self._event({"type": "response.in_progress", "response": started}),
        ]
        if self._read.reading.is_plain:
            events += map(self._event, self._items.open_message())
        return b"".join(events)

    def deltas(self, taken: Taken) -> bytes:
        """The events of new text."""
        return b"".join(
            self._event(event)
            for prompt, delta in taken
            for sample in delta.outputs
            for event in self._items.add(self._parts(prompt, sample), self._read.logprobs(sample))
        )

    def end(self) -> bytes:
        """The events after the last text."""
        (result,) = self._generation.totals()
        is_cut = result.outputs[0].finish_reason == "length"
        behind = () if self._parser is None else self._parser.tokens_behind()
        events = [self._event(event) for event in self._items.finish(is_cut=is_cut, tokens_behind=behind)]
        num_reasoning = 0 if self._parser is None else self._parser.num_reasoning_tokens
        response = self._read.ended(result, self._items.output, num_reasoning)
        events.append(self._event({"type": f"response.{response['status']}", "response": response}))
        return b"".join(events)

    def _parts(self, prompt: int, sample: CompletionOutput) -> Sequence[Part]:
        if self._read.is_plain:
            return [Content(sample.text)] if sample.text else []
        if self._parser is None:
            self._parser = self._read.parser(self._generation.prompt_token_ids(prompt))
        return self._parser.feed(sample)

    def failed(self, error: ApiError) -> bytes:
        """The events of a response that fails after its beginning."""
        reason = openai_body(error)["error"]
        response = self._read.object("failed", [], error={"code": "server_error", "message": error.message})
        code = reason["code"] or reason["type"]
        return self._event(
            {"type": "error", "code": code, "message": error.message, "param": error.param}
        ) + self._event({"type": "response.failed", "response": response})

    def _event(self, event: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event({"type": event["type"], "sequence_number": number, **event})
