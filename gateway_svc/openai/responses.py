"""POST /v1/responses: nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from cadenza.outputs import CompletionOutput, RequestOutput
from gateway_svc.fields.field import read_fields, wrong_value
from gateway_svc.fields.sampling import answer_id, check_stream_options, require, sampling_params
from gateway_svc.fields.tables import RESPONSES
from gateway_svc.http.errors import ApiError, bad_request, openai_body
from gateway_svc.http.events import named_event
from gateway_svc.http.reading import off_loop, read_object
from gateway_svc.openai.logprobs import TokenNames, chat_logprobs
from gateway_svc.openai.response_input import response_prompt
from gateway_svc.openai.response_items import ResponseItems
from gateway_svc.openai.streaming import answer_one
from gateway_svc.openai.usage import completion_tokens, prompt_tokens
from gateway_svc.parsing.output import OutputParser, Reading
from gateway_svc.parsing.parts import Content, Part
from gateway_svc.scheduler.generation import Generation, Job
from gateway_svc.scheduler.inbox import Taken
from gateway_svc.state import STATE
from gateway_svc.tools.definitions import ToolUse, response_tools
from gateway_svc.tools.preparing import prepare

_LOGPROBS = "message.output_text.logprobs"
_THOUGHTS = "reasoning.encrypted_content"


@dataclass(frozen=True, slots=True)
class _Response:
    """One request, read."""

    id: str
    model: str
    values: Mapping[str, Any]
    num_top: int | None
    reading: Reading
    use: ToolUse
    created: float = field(default_factory=time.time)

    @property
    def is_plain(self) -> bool:
        """Whether outputs are content as they are, and nobody asks which token made it."""
        return self.reading.is_plain and self.num_top is None

    def parser(self, prompt_ids: Sequence[int]) -> OutputParser:
        """A reader of its output."""
        return OutputParser(self.reading, prompt_ids, with_tokens=self.num_top is not None)

    def items(self) -> ResponseItems:
        """Where its output is put together."""
        return ResponseItems(
            self.reading.formats,
            shows_thought=bool(self.values.get("include_reasoning", True)),
            carries_thought=_THOUGHTS in self.values.get("include", ()),
        )

    def object(self, status: str, output: list[Any], **more: Any) -> dict[str, Any]:
        """The response in a state."""
        values = self.values
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": values.get("instructions"),
            "max_output_tokens": values.get("max_output_tokens"),
            "max_tool_calls": None,
            "metadata": values.get("metadata", {}),
            "model": self.model,
            "output": output,
            "parallel_tool_calls": values.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "prompt_cache_key": values.get("prompt_cache_key"),
            "reasoning": {"effort": None, "summary": None, **values.get("reasoning", {})},
            "service_tier": "default",
            "store": False,
            "temperature": values.get("temperature", 1.0),
            "text": values.get("text") or {"format": {"type": "text"}},
            "tool_choice": self.use.choice_object(),
            "tools": self.use.objects(),
            "top_logprobs": self.num_top or 0,
            "top_p": values.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": None,
            "user": values.get("user"),
            "safety_identifier": values.get("safety_identifier"),
            "presence_penalty": values.get("presence_penalty", 0.0),
            "frequency_penalty": values.get("frequency_penalty", 0.0),
            **more,
        }

    def logprobs(self, sample: CompletionOutput) -> list[dict[str, Any]]:
        """The logprobs of a sample's tokens; none if they are not wanted."""
        if self.num_top is None:
            return []
        return chat_logprobs(sample.logprobs or [], sample.token_ids, self.num_top, TokenNames())

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


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer an input."""
    state = request.app[STATE]
    caller = await state.generating(request)
    values = await off_loop(request, read_fields, RESPONSES, await read_object(request))
    require(values, "input")
    check_stream_options(values)
    _check_reasoning(values.get("reasoning", {}))
    use = await off_loop(request, response_tools, values)
    prompt = await off_loop(request, response_prompt, values, use)
    info = await caller.model()
    chosen = state.names.choose(values.get("model"), info)
    num_top = _num_top(values)
    params = sampling_params(
        values,
        {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"},
        max_tokens=values.get("max_output_tokens"),
        logprobs=num_top,
    )
    prepared = await prepare(caller, prompt, use, state.formats(info), params, values)
    read = _Response(answer_id(values, "resp", uuid.uuid4().hex), chosen.name, values, num_top, prepared.reading, use)
    job = Job([prompt], prepared.params, chosen.adapter, with_text_ends=not read.is_plain)
    is_streamed = bool(values.get("stream"))
    generation = Generation(caller, job, is_streamed=is_streamed)
    with prepared.errors():
        return await answer_one(
            request,
            generation,
            events=_ResponseEvents(read, generation) if is_streamed else None,
            whole_answer=partial(_answer, read),
        )


def _answer(read: _Response, result: RequestOutput) -> dict[str, Any]:
    (sample,) = result.outputs
    items = read.items()
    parser = read.parser(result.prompt_token_ids or [])
    parts = [Content(sample.text)] if read.is_plain else parser.feed(sample)
    is_cut = sample.finish_reason == "length"
    added = items.add(parts, read.logprobs(sample))
    for _ in [*added, *items.finish(is_cut=is_cut, tokens_behind=parser.tokens_behind())]:
        pass  # the events of a stream
    return read.ended(result, items.output, parser.num_reasoning_tokens)


def _num_top(values: Mapping[str, Any]) -> int | None:
    include = values.get("include", [])
    for index, name in enumerate(include):
        if name not in (_LOGPROBS, _THOUGHTS):
            message = f"only {_LOGPROBS} and {_THOUGHTS} are supported, not {name[:64]!a}"
            raise bad_request(f"include[{index}]: {message}", "include")
    number = values.get("top_logprobs")
    if number is not None and number < 0:
        raise wrong_value("top_logprobs", "must be 0 or more", number)
    if _LOGPROBS not in include:
        if number:
            raise bad_request(f"top_logprobs needs {_LOGPROBS} in include", "top_logprobs")
        return None
    return number or 0


def _check_reasoning(reasoning: Mapping[str, Any]) -> None:
    for name, value in reasoning.items():
        if name not in ("effort", "summary", "generate_summary"):
            raise bad_request(f"reasoning.{name[:64]!a}: there is no such field", "reasoning")
        if value is not None and not (isinstance(value, str) and value.isalpha()):
            raise wrong_value("reasoning", f"must have a word as {name}", value)


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
