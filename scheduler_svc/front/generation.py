"""GenerationService: each handler validates, calls the engine, converts the result."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterable
from typing import Any

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import generation_pb2_grpc as pb_grpc
from cadenza_common.serving.slices import run_in_slices, slices_of, to_list
from scheduler_svc.convert import generation as convert
from scheduler_svc.convert.limits import check_limits, check_request_id
from scheduler_svc.convert.plain_output import PlainOutput
from scheduler_svc.core.errors import PreconditionError, RequestRejectedError
from scheduler_svc.engine.journal import JournalUnavailableError
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.reader import RequestReader
from scheduler_svc.front import server_info as convert_models
from scheduler_svc.front.front import Front, abort_with, open_reader, stream_replaced, within
from scheduler_svc.front.server_info import server_info
from scheduler_svc.front.session import TURN_BYTES, SessionStream
from scheduler_svc.plan_loop.ports import ModelDescription
from scheduler_svc.requests.builder import RequestBuilder
from scheduler_svc.requests.fields import RequestFields
from scheduler_svc.tenants.errors import InvalidTokenError

_PIECE_BYTES = 256 * 1024
"""Of a tokenizer's file, in one message."""


class GenerationServicer(pb_grpc.GenerationServiceServicer):
    """Serves clients from a Front. Streams write through the context, so that `finally` runs as soon as one ends."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._model_info: tuple[RequestBuilder, ModelDescription, pb.GetModelInfoResponse] | None = None
        """The newest description of a model, and what it was made of: there may be thousands of added tokens."""
        self._files_turn = asyncio.Lock()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        """One request: streams its output; a slow reader gets fewer and larger messages."""
        try:
            if convert.is_long(request):
                await asyncio.sleep(0)  # Parsing it was a slice of its own.
            caller = self._front.caller_of(context)
            check_limits(request)
            fields = await run_in_slices(convert.fields_in_slices(request, caller.tenant()))
            if fields.resume is None:
                engine_request = await self._front.builder.build_off_loop(
                    fields, now=self._front.engine.clock.monotonic(), time_left_s=context.time_remaining()
                )
                live = self._front.submit(within(engine_request, self._front.caller_span(context)))
            else:
                live = self._front.attach(fields)
            reader = open_reader(live, fields)
        except Exception as exc:
            self._front.log_refused(request.request_id, exc)
            await abort_with(context, exc)
        try:
            await self._stream(reader, fields, context)
        except Exception as exc:
            await abort_with(context, exc)

    async def Session(self, request_iterator: AsyncIterable[pb.SessionRequest], context: Any) -> None:  # type: ignore[override]
        """Serve many requests over one stream."""
        try:
            self._front.check_serving()
            await SessionStream(self._front, context, self._front.caller_of(context)).run(request_iterator)
        except Exception as exc:
            await abort_with(context, exc)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """Abort a request of any stream."""
        await self._builder(context)
        try:
            check_request_id(request.request_id)
            check_limits(request)
            aborted = self._front.engine.abort(self._front.caller_of(context).name, request.request_id)
            await self._front.engine.journal.flushed()
        except (RequestRejectedError, JournalUnavailableError, InvalidTokenError) as exc:
            await abort_with(context, exc)
        return pb.AbortResponse(aborted=aborted)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        """The served model."""
        builder, model = await self._builder(context), self._front.engine.model
        if self._model_info is None or self._model_info[:2] != (builder, model):
            message = convert_models.model_info(model, builder.tokenizer, max_model_len=builder.max_model_len)
            self._model_info = builder, model, message
        return self._model_info[2]

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        """Options, load, executors; to a tenant without admin its own load alone."""
        builder = await self._builder(context)
        try:
            tenant = self._front.caller_of(context).tenant()
        except InvalidTokenError as exc:
            await abort_with(context, exc)
        return server_info(self._front, builder, tenant)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Token ids of a prompt, as in Generate."""
        builder = await self._builder(context)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        try:
            check_limits(request)
            prompt = await run_in_slices(convert.prompt_in_slices(request.prompt))
            token_ids = await builder.tokenize_off_loop(prompt, add_special_tokens=special)
        except Exception as exc:
            await abort_with(context, exc)
        response = pb.TokenizeResponse()
        for part in slices_of(token_ids):
            response.token_ids.extend(part)
            await asyncio.sleep(0)
        return response

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """Text of token ids."""
        builder = await self._builder(context)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        try:
            if builder.tokenizer is None:
                raise PreconditionError("token_ids", "the model has no tokenizer: start the server with --tokenizer")
            check_limits(request)
            token_ids = await run_in_slices(to_list(request.token_ids))
            await run_in_slices(builder.check_ids_in_slices(token_ids, "token_ids"))
            work = functools.partial(builder.tokenizer.decode, token_ids, skip_special_tokens=skip)
            text = await builder.tokenizer.run(work, len(token_ids))
        except Exception as exc:
            await abort_with(context, exc)
        return pb.DetokenizeResponse(text=text)

    async def GetTokenizerFiles(self, request: pb.GetTokenizerFilesRequest, context: Any) -> None:  # type: ignore[override]
        """The tokenizer's files, of one caller at a time: they may have 30 MB."""
        tokenizer = (await self._builder(context)).tokenizer
        try:
            if tokenizer is None:
                raise PreconditionError("tokenizer", "the model has none: start the server with --tokenizer")
            async with self._files_turn:
                for name, content in (await asyncio.to_thread(tokenizer.files)).items():
                    for start in range(0, max(1, len(content)), _PIECE_BYTES):
                        data = content[start : start + _PIECE_BYTES]
                        await context.write(pb.GetTokenizerFilesResponse(name=name, data=data))
        except Exception as exc:
            await abort_with(context, exc)

    async def _stream(self, reader: RequestReader, fields: RequestFields, context: Any) -> None:
        """Send a request's output until it finishes; the engine learns when the stream ends, early or not.

        Raises the error of a request that ended with one, after its output so far, and StreamReplacedError.
        """
        live, wake, turns = reader.live, asyncio.Event(), self._front.turns
        plain: PlainOutput | None = None

        def listener(_: LiveRequest) -> None:
            turns.request(wake)

        self._front.engine.listen(live, listener)
        try:
            with self._front.stream(wake):
                while not reader.done:
                    wake.clear()
                    if live.listener is not listener:
                        raise stream_replaced()
                    message: bytes | pb.GenerateResponse | None = plain.take_response() if plain is not None else None
                    is_whole = True
                    if message is None and (chunk := reader.take(TURN_BYTES)) is not None:
                        message, is_whole = pb.GenerateResponse(), chunk.is_whole
                        convert.fill_response(message, live, chunk, with_prompt_ids=fields.return_prompt_token_ids)
                        plain = plain or PlainOutput.of(reader)
                    if message is not None:
                        await context.write(message)
                    elif live.error is not None:
                        raise live.error
                    else:
                        self._front.check_serving()
                    if is_whole and live.error is None and not self._front.is_stopped and not reader.done:
                        # Other streams first, even if there is new output already.
                        await wake.wait()
        finally:
            turns.withdraw(wake)
            self._front.engine.detach(live, listener, handed_over=reader.done)

    async def _builder(self, context: Any) -> RequestBuilder:
        try:
            return self._front.builder
        except Exception as exc:
            await abort_with(context, exc)
