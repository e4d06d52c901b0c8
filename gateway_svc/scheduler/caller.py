"""One API key at the scheduler: its calls, and the session for its requests."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import posixpath
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import grpc

from cadenza.adapters import AdapterInfo, adapter_from_proto
from cadenza.calls import convert
from cadenza.credentials import authorized, call_metadata
from cadenza.errors import AlreadyExistsError, CadenzaError, NotFoundError, UnavailableError
from cadenza.info import ModelInfo, ServerInfo
from cadenza.prompts import Prompt
from cadenza.v1 import admin_pb2, generation_pb2
from cadenza.v1.admin_pb2_grpc import AdminServiceStub
from cadenza.v1.generation_pb2_grpc import GenerationServiceStub
from gateway_svc.scheduler.calls import Calls
from gateway_svc.scheduler.session import GatewaySession, PromptRun

_MODEL_AGE_S = 10.0
"""The model's description is asked for again after so long: another one may be served after a restart."""
_CALL_TIMEOUT_S = 30.0
_POLL_S = 0.1
"""Between looks at an adapter that is being loaded."""
_FILES_S = 120.0


class SchedulerCaller:
    """Calls with one key, or with none."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        target: str,
        key: str | None,
        *,
        timeout_s: float,
        calls: Calls,
        on_response: Callable[[], None],
        on_loss: Callable[[], None],
        shared: GatewaySession | None = None,
    ) -> None:
        """shared: a session of all callers, in which each of their requests names its tenant."""
        metadata = call_metadata(key)
        self._generation: Any = authorized(GenerationServiceStub(channel), metadata)
        self._admin: Any = authorized(AdminServiceStub(channel), metadata)
        self._calls = calls
        self._model: ModelInfo | None = None
        self._model_at = 0.0
        self.timeout_s = timeout_s
        self.tenant = b"" if shared is None or key is None else hashlib.sha256(key.encode()).digest()
        """As its requests name it; nothing: the session is its own."""
        self._own = GatewaySession(
            self._generation,
            target,
            timeout_s,
            was_reached=lambda: calls.was_reached,
            on_response=on_response,
            on_loss=on_loss,
        )
        """Opens a stream with its first request."""
        self._shared = shared
        self._on_loss = on_loss

    @property
    def session(self) -> GatewaySession:
        """The one for its requests."""
        return self._shared or self._own

    @property
    def run_alone(self) -> Callable[[PromptRun], None] | None:
        """Runs a request in its own session, if another one is for its requests."""
        return None if self._shared is None else self._run_alone

    async def check_model(self, *, waits: bool = True) -> ModelInfo:
        """The served model, asked for now; waits: also for a scheduler that is being restarted."""

        def call() -> Awaitable[generation_pb2.GetModelInfoResponse]:
            request = generation_pb2.GetModelInfoRequest()
            response: Awaitable[generation_pb2.GetModelInfoResponse] = self._generation.GetModelInfo(
                request, timeout=_CALL_TIMEOUT_S
            )
            return response

        response = await (self._calls.repeated(call) if waits else self._calls.once(call()))
        self._model, self._model_at = convert.model_info_from_proto(response), time.monotonic()
        return self._model

    async def model(self) -> ModelInfo:
        """The served model, as it was a few seconds ago; while the scheduler is away, as it was before."""
        if self._model is None:
            return await self.check_model()
        if time.monotonic() - self._model_at >= _MODEL_AGE_S:
            with contextlib.suppress(UnavailableError):
                await self.check_model(waits=False)
        return self._model

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text or a chat."""
        request = generation_pb2.TokenizeRequest(
            prompt=[convert.prompt_to_proto(prompt)], add_special_tokens=add_special_tokens
        )
        return list((await self._call(self._generation.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._call(self._generation.Detokenize, request)).text)

    async def may_name_tenants(self) -> bool:
        """Whether a session with this key may carry requests of other tenants."""
        request = generation_pb2.GetServerInfoRequest()
        response = await self._calls.once(self._generation.GetServerInfo(request, timeout=_CALL_TIMEOUT_S))
        return bool(response.may_name_tenants)

    async def adapters(self) -> list[AdapterInfo]:
        """The LoRA adapters, as far as this key may see them."""
        found = await self._call(self._admin.ListAdapters, admin_pb2.ListAdaptersRequest())
        return [adapter_from_proto(each) for each in found.adapters]

    async def load_adapter(self, name: str, path: str) -> None:
        """Give a LoRA adapter's folder, where the executors run, a name."""
        request = admin_pb2.LoadAdapterRequest(name=name, path=path)

        async def is_loaded() -> bool:
            """Whether the one that is there is this one, as soon as it is loaded."""
            while (found := next((each for each in await self.adapters() if each.name == name), None)) is not None:
                if found.content_hash or found.path != posixpath.normpath(path):
                    return found.path == posixpath.normpath(path)
                await asyncio.sleep(_POLL_S)
            await self._calls.once(self._admin.LoadAdapter(request))  # it has failed: this says why
            return True

        await self._calls.changed(lambda: self._admin.LoadAdapter(request), AlreadyExistsError, is_loaded)

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter's name away."""
        request = admin_pb2.UnloadAdapterRequest(name=name)
        await self._calls.changed(lambda: self._admin.UnloadAdapter(request), NotFoundError)

    async def server_info(self) -> ServerInfo:
        """The scheduler's state, as far as this key may see it."""
        request = generation_pb2.GetServerInfoRequest()
        return convert.server_info_from_proto(await self._call(self._generation.GetServerInfo, request))

    async def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files by name; raises FailedPreconditionError without a tokenizer."""
        files: defaultdict[str, bytearray] = defaultdict(bytearray)

        async def read() -> None:
            call = self._generation.GetTokenizerFiles(generation_pb2.GetTokenizerFilesRequest(), timeout=_FILES_S)
            async for piece in call:
                files[piece.name] += piece.data

        await self._calls.once(read())
        return {name: bytes(content) for name, content in files.items()}

    async def kv_events(self, start: int) -> AsyncGenerator[admin_pb2.SubscribeKvEventsResponse, None]:
        """Batches of KV events, from this number on or with the present state first, while the stream lasts.

        Raises UnavailableError when the scheduler goes, as other calls do.
        """
        call = self._admin.SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest(start_sequence_number=start))
        try:
            while (batch := await self._calls.once(call.read())) is not grpc.aio.EOF:
                yield batch
        finally:
            call.cancel()

    async def flush_prefix_cache(self) -> None:
        """Empty the prefix caches; raises FailedPreconditionError while requests run."""
        request = admin_pb2.FlushPrefixCacheRequest()
        await self._calls.once(self._admin.FlushPrefixCache(request, timeout=_CALL_TIMEOUT_S))

    async def metrics(self) -> bytes:
        """The scheduler's metrics in Prometheus' text format."""
        request = admin_pb2.GetMetricsRequest()
        response = await self._calls.once(self._admin.GetMetrics(request, timeout=_CALL_TIMEOUT_S))
        return bytes(response.text.encode())

    def abort(self, run: PromptRun) -> None:
        """End a request that nobody waits for any more; does nothing if it has ended."""
        self.session.abort(run)
        self._own.abort(run)

    def end(self, run: PromptRun, error: CadenzaError) -> None:
        """End a request early whose output so far is wanted: it ends with its last output, or else with the error."""
        self.session.end(run, error)
        self._own.end(run, error)

    @property
    def num_own_requests(self) -> int:
        """Requests that run in a session of its own."""
        return len(self._own.live)

    def end_all(self) -> None:
        """Abort what runs in its own session, with an error for whoever waits for it."""
        self._own.end_all()

    async def close(self) -> None:
        """End its own session."""
        await self._own.close()

    def _run_alone(self, run: PromptRun) -> None:
        self._on_loss()  # of the right to name tenants
        self._own.start(run)

    async def _call(self, method: Callable[..., Awaitable[Any]], request: Any) -> Any:
        return await self._calls.repeated(lambda: method(request, timeout=_CALL_TIMEOUT_S))


async def close_all(callers: Sequence[SchedulerCaller]) -> None:
    """End their sessions."""
    await asyncio.gather(*(each.close() for each in callers))
