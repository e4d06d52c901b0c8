"""POST /v1/responses: nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from cadenza.gateway.fields.field import read_fields, wrong_value
from cadenza.gateway.fields.sampling import answer_id, check_stream_options, require, sampling_params
from cadenza.gateway.fields.tables import RESPONSES
from cadenza.gateway.http.errors import ApiError, bad_request, openai_body
from cadenza.gateway.http.events import named_event
from cadenza.gateway.http.reading import read_object
from cadenza.gateway.openai.failures import whole
from cadenza.gateway.openai.logprobs import TokenNames, chat_logprobs
from cadenza.gateway.openai.response_input import response_prompt
from cadenza.gateway.openai.streaming import stream_answer
from cadenza.gateway.openai.usage import completion_tokens, prompt_tokens
from cadenza.gateway.scheduler.generation import Generation, Job
from cadenza.gateway.scheduler.inbox import Taken
from cadenza.gateway.state import STATE
from cadenza.outputs import CompletionOutput, RequestOutput

_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True)
class _Response:
    """One request, read."""

    id: str
    model: str
    values: Mapping[str, Any]
    num_top: int | None
    created: float = field(default_factory=time.time)
    item_id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")

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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "prompt_cache_key": values.get("prompt_cache_key"),
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": values.get("temperature", 1.0),
            "text": values.get("text") or {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
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

    def part(self, sample: CompletionOutput) -> dict[str, Any]:
        """The text as a part of the message."""
        return {"type": "output_text", "text": sample.text, "annotations": [], "logprobs": self.logprobs(sample)}

    def item(self, status: str, content: list[Any]) -> dict[str, Any]:
        """The message."""
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def ended(self, result: RequestOutput) -> dict[str, Any]:
        """The response at its end."""
        (sample,) = result.outputs
        is_cut = sample.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        more: dict[str, Any] = {"usage": _usage(result)}
        if is_cut:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            more["completed_at"] = time.time()
        item = self.item(status, [self.part(sample)])
        return self.object(status, [item], **more)


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer an input."""
    state = request.app[STATE]
    caller = await state.generating(request)
    values = read_fields(RESPONSES, await read_object(request))
    require(values, "input")
    check_stream_options(values)
    prompt = response_prompt(values)
    chosen = state.names.choose(values.get("model"), await caller.model())
    num_top = _num_top(values)
    params = sampling_params(
        values,
        {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"},
        max_tokens=values.get("max_output_tokens"),
        logprobs=num_top,
    )
    read = _Response(answer_id(values, "resp", uuid.uuid4().hex), chosen.name, values, num_top)
    generation = Generation(caller, Job([prompt], params, chosen.adapter), is_streamed=bool(values.get("stream")))
    async with generation:
        if values.get("stream"):
            events = _ResponseEvents(read, generation)
            return await stream_answer(
                request,
                generation,
                begin=events.begin,
                events_of=events.deltas,
                end=events.end,
                failed=events.failed,
            )
        (result,) = whole(await generation.results())
    return web.json_response(read.ended(result))


def _num_top(values: Mapping[str, Any]) -> int | None:
    include = values.get("include", [])
    for index, name in enumerate(include):
        if name != _LOGPROBS:
            raise bad_request(f"include[{index}]: only {_LOGPROBS} is supported, not {name[:64]!a}", "include")
    number = values.get("top_logprobs")
    if number is not None and number < 0:
        raise wrong_value("top_logprobs", "must be 0 or more", number)
    if not include:
        if number:
            raise bad_request(f"top_logprobs needs {_LOGPROBS} in include", "top_logprobs")
        return None
    return number or 0


def _usage(result: RequestOutput) -> dict[str, Any]:
    num_input, num_output = prompt_tokens(result), completion_tokens(result)
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": result.num_cached_tokens or 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_input + num_output,
    }


class _ResponseEvents:
    """The events of a streamed response, numbered."""

    def __init__(self, read: _Response, generation: Generation) -> None:
        self._read = read
        self._generation = generation
        self._number = 0
        self._place = {"item_id": read.item_id, "output_index": 0, "content_index": 0}

    def begin(self) -> bytes:
        """The events before the first text."""
        read = self._read
        started = read.object("in_progress", [])
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return b"".join(
            (
                self._event("response.created", response=started),
                self._event("response.in_progress", response=started),
                self._event("response.output_item.added", output_index=0, item=read.item("in_progress", [])),
                self._event("response.content_part.added", **self._place, part=empty),
            )
        )

    def deltas(self, taken: Taken) -> bytes:
        """The events of new text."""
        events = []
        for _, delta in taken:
            for sample in delta.outputs:
                logprobs = self._read.logprobs(sample)
                if sample.text or logprobs:
                    text = {"delta": sample.text, "logprobs": logprobs}
                    events.append(self._event("response.output_text.delta", **self._place, **text))
        return b"".join(events)

    def end(self) -> bytes:
        """The events after the last text."""
        read = self._read
        (result,) = self._generation.totals()
        (sample,) = result.outputs
        response = read.ended(result)
        part = read.part(sample)
        text = {"text": sample.text, "logprobs": part["logprobs"]}
        return b"".join(
            (
                self._event("response.output_text.done", **self._place, **text),
                self._event("response.content_part.done", **self._place, part=part),
                self._event("response.output_item.done", output_index=0, item=response["output"][0]),
                self._event(f"response.{response['status']}", response=response),
            )
        )

    def failed(self, error: ApiError) -> bytes:
        """The events of a response that fails after its beginning."""
        reason = openai_body(error)["error"]
        response = self._read.object("failed", [], error={"code": "server_error", "message": error.message})
        return self._event(
            "error", code=reason["code"] or reason["type"], message=error.message, param=error.param
        ) + self._event("response.failed", response=response)

    def _event(self, kind: str, **more: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event({"type": kind, "sequence_number": number, **more})
