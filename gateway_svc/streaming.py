"""The answer to a request that runs: one object, or events that are written as what they tell arrives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from aiohttp import web

from cadenza.errors import CadenzaError
from cadenza.outputs import CompletionOutput, RequestOutput
from gateway_svc.http.errors import ApiError, api_error
from gateway_svc.http.sending import EventStream
from gateway_svc.scheduler.generation import Generation
from gateway_svc.scheduler.inbox import Taken
from gateway_svc.state import STATE

_STATUS: Mapping[str, int] = {"grammar": 400, "no_allowed_token": 400, "deadline": 504}
"""By the detail of a finish: what the request itself has brought about. All others are the server's: 500."""
_WORDS = {
    "grammar": "the constraint and the other fields left no token to choose, or a limit of the constraint was reached",
    "no_allowed_token": "allowed_token_ids, bad_words and min_tokens left no token to choose",
    "deadline": "its deadline passed",
    "aborted": "it was aborted at the server",
    "non_finite_logits": "the model's logits were not finite",
    "executor_error": "the executor refused it, or was lost too often",
}


class AnswerEvents(Protocol):
    """The events of one streamed answer, from its beginning to its end."""

    def begin(self) -> bytes:
        """The first ones."""

    def deltas(self, taken: Taken) -> bytes:
        """Those of new deltas."""

    def end(self) -> bytes:
        """The last ones."""

    def failed(self, error: ApiError) -> bytes:
        """Those of an answer that fails after its beginning."""


class Answer(Protocol):
    """How one request is answered."""

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer as one object; results: of the prompts, in their order."""

    def events(self, generation: Generation) -> AnswerEvents:
        """The answer as a stream."""


async def answer_with(
    request: web.Request,
    generation: Generation,
    answer: Answer,
    *,
    is_streamed: bool,
    errors: AbstractContextManager[None],
) -> web.StreamResponse:
    """Run a generation and answer it; errors: gives those of the caller's constraint the name of its field."""
    with errors:
        async with generation:
            if is_streamed:
                return await _stream(request, generation, answer.events(generation))
            return web.json_response(answer.whole(_whole(await generation.results())))


async def _stream(request: web.Request, generation: Generation, events: AnswerEvents) -> web.StreamResponse:
    """Stream an answer and return its response: what has arrived becomes events, which are written at once.

    Raises the error of a request that fails before its first output; after it there are events of it. Text that comes
    with the failure is not written.
    """
    state = request.app[STATE]
    stream = EventStream(request, state.config.http_write_timeout_s)
    counts = state.counts
    try:
        taken = await generation.take()
        prefix = events.begin()
        while taken is not None:
            counts.num_deltas += len(taken)
            _whole([delta for _, delta in taken])
            written = prefix + events.deltas(taken)
            prefix = b""
            if written:
                counts.num_writes += 1
                await stream.write(written)
            taken = await generation.take()
        await stream.write(prefix + events.end())
    except (CadenzaError, ApiError) as error:
        if not stream.has_begun:
            raise
        await stream.write(events.failed(error if isinstance(error, ApiError) else api_error(error)))
    return await stream.end()


def _whole(results: Sequence[RequestOutput]) -> Sequence[RequestOutput]:
    """The results, or deltas; raises ApiError if one of their samples has failed: no client takes it for an answer."""
    for result in results:
        for sample in result.outputs:
            if sample.finish_reason in ("error", "abort"):
                raise _failure(sample)
    return results


def _failure(sample: CompletionOutput) -> ApiError:
    detail = sample.finish_detail or str(sample.finish_reason)
    return ApiError(_STATUS.get(detail, 500), f"the request failed: {_WORDS.get(detail, detail)}", code=detail)
