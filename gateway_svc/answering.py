"""The way of a chat through the gateway: read once, prepared, run and answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from aiohttp import web

from gateway_svc.parsing.output import Reading
from gateway_svc.requests.request import GatewayRequest
from gateway_svc.scheduler.generation import Generation, GenerationJob
from gateway_svc.state import STATE
from gateway_svc.streaming import GatewayAnswer, answer_with
from gateway_svc.tools.preparing import prepare

R = TypeVar("R", bound=GatewayRequest)


async def answer_chat(
    request: web.Request,
    read: Callable[[Mapping[str, Any]], R],
    answer_of: Callable[[R, Reading, str], GatewayAnswer],
) -> web.StreamResponse:
    """Answer a request whose output may have thoughts and calls; raises ApiError and CadenzaError.

    answer_of: takes the request, how its output is read, and the model's name in the answer.
    """
    asked, state, caller = await request.app[STATE].asked(request, read)
    info = await caller.model()
    asked = replace(asked, params=asked.suggested(info.default_sampling))
    chosen, formats = state.names.choose(asked.model, info), await state.formats.of(info)
    prepared = await prepare(caller, asked, formats)
    with_text_ends = asked.splits_logprobs or not prepared.reading.is_plain
    job = GenerationJob(asked.prompts, prepared.params, chosen.adapter, with_text_ends=with_text_ends)
    with prepared.errors():
        generation = Generation(caller, job, is_streamed=asked.is_streamed)
    answer = answer_of(asked, prepared.reading, chosen.name)
    return await answer_with(request, generation, answer, is_streamed=asked.is_streamed, errors=prepared.errors())
