"""vllm.grpc.engine.VllmEngine: the scheduler as routers see a vLLM, such as SMG and llm-d."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import time
import zipfile
from collections.abc import Iterator, Mapping

import grpc

from cadenza.errors import FailedPreconditionError
from gateway_svc.dialects import smg_common_pb2 as common
from gateway_svc.dialects import vllm_engine_pb2 as pb
from gateway_svc.dialects import vllm_engine_pb2_grpc as pb_grpc
from gateway_svc.rpc.calls import Context, abort_with, counted, key_of, write
from gateway_svc.scheduler.caller import SchedulerCaller
from gateway_svc.state import State
from gateway_svc.vllm.descriptions import Loads, model_info, server_info
from gateway_svc.vllm.generating import RunningRequests, generate
from gateway_svc.vllm.kv_events import kv_batch

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
_MAX_FLUSH_S = 600.0
_FLUSH_RETRY_S = 0.1
_PIECE_BYTES = 64 * 1024
_ARCHIVE_TIME = (1980, 1, 1, 0, 0, 0)
"""Of each file in an archive: equal files make equal archives."""


class EngineServicer(pb_grpc.VllmEngineServicer):
    """Serves routers."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._running = RunningRequests()
        self._loads = Loads()
        self._last_request_at = 0.0

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """One request."""
        self._last_request_at = time.time()
        try:
            async with counted(self._state, "Generate"):
                await generate(self._state, self._running, request, context)
        except Exception as error:
            await abort_with(context, error, "Generate")

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Refused."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there are no embeddings: the served model generates text")

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """Whether requests are served."""
        state = self._state
        if state.is_stopping:
            return pb.HealthCheckResponse(message="the gateway is stopping")
        if not state.link.is_serving:
            return pb.HealthCheckResponse(message=await state.link.why_unserved())
        return pb.HealthCheckResponse(healthy=True, message="serving")

    async def FlushCache(self, request: common.FlushCacheRequest, context: Context) -> common.FlushCacheResponse:
        """Empty the prefix caches, once no request runs."""
        try:
            caller = await self._state.watcher_with(key_of(context))
            await _flush(caller, request.timeout_s)
        except FailedPreconditionError as error:
            return common.FlushCacheResponse(message=error.message)
        except Exception as error:
            await abort_with(context, error, "FlushCache")
        return common.FlushCacheResponse(success=True, message="the prefix cache is empty")

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End requests of this caller; ids that are unknown are as ended."""
        self._running.abort(key_of(context), request.request_ids)
        return pb.AbortResponse()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """The model."""
        try:
            info = await (await self._caller(context)).model()
        except Exception as error:
            await abort_with(context, error, "GetModelInfo")
        return model_info(info, self._state.names.of_model(info)[0])

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """The server."""
        try:
            caller = await self._caller(context)
            response = server_info(await caller.server_info(), await caller.model())
        except Exception as error:
            await abort_with(context, error, "GetServerInfo")
        response.last_receive_timestamp = self._last_request_at
        return response

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """The load."""
        try:
            return self._loads.message(await (await self._caller(context)).server_info())
        except Exception as error:
            await abort_with(context, error, "GetLoads")

    async def GetTokenizer(self, request: common.GetTokenizerRequest, context: Context) -> None:  # type: ignore[override]
        """The tokenizer's files."""
        try:
            files = await (await self._caller(context)).tokenizer_files()
            for piece in pieces(await asyncio.to_thread(archive, files)):
                await write(self._state, context, piece)
        except Exception as error:
            await abort_with(context, error, "GetTokenizer")

    async def SubscribeKvEvents(  # type: ignore[override]
        self, request: common.SubscribeKvEventsRequest, context: Context
    ) -> None:
        """What the prefix caches hold."""
        try:
            caller = await self._state.watcher_with(key_of(context))
            async with contextlib.aclosing(caller.kv_events(request.start_sequence_number)) as batches:
                async for batch in batches:
                    await write(self._state, context, kv_batch(batch))
        except Exception as error:
            await abort_with(context, error, "SubscribeKvEvents")

    async def _caller(self, context: Context) -> SchedulerCaller:
        return await self._state.caller_with(key_of(context))


async def _flush(caller: SchedulerCaller, timeout_s: float) -> None:
    """Empty the prefix caches; raises FailedPreconditionError if requests run for so long."""
    until = time.monotonic() + min(max(timeout_s, 0.0), _MAX_FLUSH_S)
    while True:
        try:
            await caller.flush_prefix_cache()
            return
        except FailedPreconditionError:
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(_FLUSH_RETRY_S)


def archive(files: Mapping[str, bytes]) -> bytes:
    """The archive; a second for large ones, so for a thread."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content in sorted(files.items()):
            zipped.writestr(zipfile.ZipInfo(name, _ARCHIVE_TIME), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def pieces(content: bytes) -> Iterator[common.GetTokenizerChunk]:
    """The archive in pieces; the last has its hash."""
    last = max(0, len(content) - 1) // _PIECE_BYTES
    for index in range(last + 1):
        piece = content[index * _PIECE_BYTES : (index + 1) * _PIECE_BYTES]
        yield common.GetTokenizerChunk(data=piece, sha256=hashlib.sha256(content).hexdigest() if index == last else "")
