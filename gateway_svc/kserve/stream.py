"""ModelStreamInfer: the requests of one stream, each with its answers as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from cadenza.outputs import RequestMetrics
from cadenza.prompts import Prompt
from gateway_svc.dialects import inference_pb2 as pb
from gateway_svc.http.bodies.apart import SHORT_BYTES
from gateway_svc.kserve.answers import KServeAnswers, failed
from gateway_svc.kserve.model import Statistics
from gateway_svc.kserve.requests import read_request, read_wire
from gateway_svc.rpc.calls import Context, SlowClientError, counted, explained, key_of, write
from gateway_svc.scheduler.generation import Generation, GenerationJob
from gateway_svc.state import State

_PATH = "ModelStreamInfer"
_EMPTY_FINAL = "triton_enable_empty_final_response"
MAX_BYTES = 16 * 1024 * 1024
"""Of the requests of one stream that have not been answered; further ones are not read before some have."""
_OWN_BYTES = 4096
"""What a request takes beside its message."""


class InferStream:
    """One stream: its end ends its requests, an error of one does not."""

    def __init__(self, state: State, statistics: Statistics, context: Context) -> None:
        self._state = state
        self._statistics = statistics
        self._context = context
        self._key = key_of(context)
        self._turn = asyncio.Lock()
        """One writes at a time."""
        self._num_bytes = 0
        self._has_room = asyncio.Event()

    async def run(self, requests: AsyncIterator[pb.ModelInferRequest]) -> None:
        """Serve all requests of the stream; returns once the client has ended it and all are answered.

        Raises ApiError and CadenzaError for a key that may send none.
        """
        await self._state.caller_with(self._key)
        async with asyncio.TaskGroup() as running:
            async for request in requests:
                size = request.ByteSize() + _OWN_BYTES
                self._num_bytes += size
                task = running.create_task(self._serve(request), name="kserve-request")
                task.add_done_callback(partial(self._answered, size))
                while self._num_bytes > MAX_BYTES:
                    self._has_room.clear()
                    await self._has_room.wait()

    def _answered(self, num_bytes: int, _: asyncio.Task[None]) -> None:
        self._num_bytes -= num_bytes
        self._has_room.set()

    async def _serve(self, request: pb.ModelInferRequest) -> None:
        """Answer one request, if need be with an error."""
        request_id, model = request.id, request.model_name
        try:
            async with counted(self._state, _PATH):
                metrics = await self._answer(request)
            self._statistics.succeeded(metrics)
            return
        except SlowClientError:
            raise
        except Exception as error:
            message = explained(error, _PATH).message
        del request  # its prompt need not wait with the error
        self._statistics.failed()
        await self._write(failed(request_id, model, message))

    async def _answer(self, request: pb.ModelInferRequest) -> RequestMetrics | None:
        state = self._state
        caller = await state.generating_with(self._key)
        if request.ByteSize() <= SHORT_BYTES:
            asked = read_request(request)
        else:
            who = await state.payer(self._key, self._context.peer().rpartition(":")[0])
            asked = await state.long_bodies.read(who, read_wire, request.SerializeToString())
        chosen = state.names.choose(asked.model, await caller.model())
        job = GenerationJob([Prompt(text=asked.prompt)], asked.params, adapter=asked.adapter or chosen.adapter)
        answers = KServeAnswers(request.id, asked)
        ends_empty = request.parameters[_EMPTY_FINAL].bool_param if _EMPTY_FINAL in request.parameters else False
        async with Generation(caller, job, is_streamed=asked.is_streamed) as generation:
            if not asked.is_streamed:
                (result,) = await generation.results()
                await self._write(answers.whole(result, is_final=not ends_empty))
            else:
                await self._stream(generation, answers, ends_empty=ends_empty)
        if ends_empty:
            await self._write(answers.empty_final())
        return generation.total(0).metrics

    async def _stream(self, generation: Generation, answers: KServeAnswers, *, ends_empty: bool) -> None:
        """Send what arrives; the last answer says that it is the last, unless an empty one follows."""
        while (taken := await generation.take()) is not None:
            deltas = [delta for _, delta in taken]
            self._state.counts.num_deltas += len(deltas)
            is_final = not ends_empty and any(delta.finished for delta in deltas)
            await self._write(answers.part(deltas, len(generation.prompt_token_ids(0)), is_final=is_final))

    async def _write(self, response: pb.ModelStreamInferResponse) -> None:
        async with self._turn:
            await write(self._state, self._context, response)
