"""POST /page/chat: a chat of the playground, and what becomes of its request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from cadenza.errors import CadenzaError
from cadenza.outputs import RequestOutput
from cadenza.prompts import Prompt
from cadenza.sampling_params import SamplingParams
from gateway_svc.fields.field import as_integers
from gateway_svc.http.errors import ApiError, api_error, bad_request, openai_body
from gateway_svc.http.reading import read_body
from gateway_svc.http.sending import EventStream, data_event
from gateway_svc.page.feed import Feed
from gateway_svc.page.journey import Journey
from gateway_svc.requests.prompts import chat_prompt
from gateway_svc.scheduler.generation import Generation, GenerationJob
from gateway_svc.scheduler.inbox import Taken
from gateway_svc.state import STATE

_MAX_TOKENS = 512
_FIELDS = {"messages", "max_tokens", "temperature", "seed"}
_SAMPLING = {"temperature": 0.7, "top_p": 0.95}
"""Of a model whose files suggest none."""
_RECORD_S = 1.0
"""How long the record of the end may come after the last token: a fifth of it is between two messages of the watch."""


async def chat(request: web.Request, feed: Feed) -> web.StreamResponse:
    """Stream an answer: text, the request's journey as it grows, and its counts and times at the end."""
    state = request.app[STATE]
    caller = await state.generating(request)
    prompt, sampling = await read_body(request, _read)
    info = await caller.model()
    params = SamplingParams(**{**(info.default_sampling or _SAMPLING), **sampling})
    if not info.has_chat_template:  # then the last message's text alone
        assert prompt.messages is not None
        prompt = Prompt(text=prompt.messages[-1].content or "")
    generation = Generation(caller, GenerationJob([prompt], params), is_streamed=True)
    (request_id,) = generation.request_ids
    journey = feed.board.follow(request_id)
    stream = EventStream(request, state.config.http_write_timeout_s)
    try:
        async with generation:
            await stream.write(data_event({"type": "begin", "request_id": request_id}))
            await _stream(stream, generation, journey, feed)
            return await stream.end()
    finally:
        feed.board.unfollow(request_id)


async def _stream(stream: EventStream, generation: Generation, journey: Journey, feed: Feed) -> None:
    version = 0
    try:
        while (taken := await generation.take()) is not None:
            events = [_text(taken)]
            if journey.version != version:
                version = journey.version
                events.append(data_event(journey.fields()))
            await stream.write(b"".join(events))
    except (CadenzaError, ApiError) as error:
        told = error if isinstance(error, ApiError) else api_error(error)
        await stream.write(data_event({"type": "error", **openai_body(told)}))
        return
    if feed.is_watching:
        await journey.wait_left(_RECORD_S)
    (result,) = generation.totals()
    await stream.write(data_event(journey.fields()) + data_event(_end(result)))


def _text(taken: Taken) -> bytes:
    samples = [sample for _, delta in taken for sample in delta.outputs]
    text = "".join(sample.text for sample in samples)
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    return data_event({"type": "text", "text": text, "tokens": num_tokens}) if num_tokens or text else b""


def _end(result: RequestOutput) -> dict[str, Any]:
    sample, metrics = result.outputs[0], result.metrics
    end: dict[str, Any] = {"type": "end", "finish": sample.finish_detail or sample.finish_reason}
    if metrics is not None:
        end |= {
            "prompt_tokens": metrics.num_prompt_tokens,
            "cached_tokens": metrics.num_cached_tokens,
            "output_tokens": metrics.num_completion_tokens,
            "preemptions": metrics.num_preemptions,
            "queue_s": round(metrics.queue_s, 4),
            "first_token_s": round(metrics.first_token_s, 4),
            "total_s": round(metrics.total_s, 4),
        }
    return end


def _read(body: Mapping[str, Any]) -> tuple[Prompt, dict[str, Any]]:
    """Read a request: its chat, and the fields of SamplingParams that it has. Raises ApiError."""
    params = _params(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a list with a message", "messages")
    return chat_prompt(messages), params


def _params(body: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(body.keys() - _FIELDS)
    if unknown:
        raise bad_request("there is no such field", unknown[0])
    max_tokens, temperature = as_integers(body.get("max_tokens", 128)), body.get("temperature")
    if not _is_number(max_tokens, int) or not 1 <= max_tokens <= _MAX_TOKENS:
        raise bad_request(f"max_tokens must be 1 to {_MAX_TOKENS}", "max_tokens")
    if temperature is not None and not (_is_number(temperature, (int, float)) and 0 <= temperature <= 2):
        raise bad_request("temperature must be 0 to 2", "temperature")
    seed = as_integers(body.get("seed"))
    if seed is not None and not (_is_number(seed, int) and 0 <= seed < 2**64):
        raise bad_request("seed must be 0 to 2^64 - 1", "seed")
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    return {name: value for name, value in given.items() if value is not None}


def _is_number(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
