"""The client on grpc.aio: the only implementation, which the blocking `Client` runs on a thread."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

import grpc

from cadenza.adapters import Adapter, AdapterInfo, Adapters, adapter_from_proto, adapter_name
from cadenza.calls import convert
from cadenza.calls.batch import BatchItem, OnOutput, SessionBatch, batch_results
from cadenza.calls.loop_thread import claim_grpc
from cadenza.calls.output_collector import OutputCollector
from cadenza.calls.reconnect import RECONNECT_TIMEOUT_S, Attempts, checked_timeout, grace_s
from cadenza.calls.request_stream import RequestStream
from cadenza.calls.short_interrupts import shorten_interrupts
from cadenza.chats import JsonObjects, chat_options
from cadenza.credentials import authorized, call_metadata, check_connection, checked_model, chosen_token
from cadenza.errors import UnavailableError, from_rpc_error
from cadenza.info import ModelInfo, ServerInfo
from cadenza.outputs import RequestOutput
from cadenza.prompts import (
    CallOptions,
    Messages,
    Params,
    Prompt,
    Prompts,
    SinglePrompt,
    match_params,
    parse_chat,
    parse_chats,
    parse_prompt,
    parse_prompts,
    parse_request_id,
    parse_text_or_chat,
    parse_token_ids,
)
from cadenza.sampling_params import SamplingParams
from cadenza.tls_client import client_files, client_tls, explained_unavailable
from cadenza.v1 import admin_pb2, generation_pb2, generation_pb2_grpc
from cadenza.v1.admin_pb2_grpc import AdminServiceStub
from cadenza_common.wire.tls import TLS
from cadenza_common.wire.transport import SCHEDULER_PORT, aio_channel, format_address, parse_address

T = TypeVar("T")


class AsyncClient:
    """A client of one Cadenza server at `HOST:PORT`; use it within one event loop.

    The first call makes the connection. Every method raises a subclass of `CadenzaError` for requests that the server
    refuses or fails, UnavailableError if it cannot be reached, and ValueError for invalid arguments. A call that is
    left early (by an exception, cancellation, or a closed or dropped generator) is cancelled, and the server aborts its
    requests.

    `model`: its name, for a server with several (docs/several-models.md), which loads it at its first call; a server
    of one model takes no notice.

    `token` is the tenant's token, for a server with a tenants file; without it, the environment's CADENZA_TOKEN. It is
    not sent to another machine without TLS unless `insecure`.

    `generate`, `chat` and `stream` go on after a lost connection or a restart of the server: they reconnect for up to
    `reconnect_timeout_s` seconds without a response, and bring the rest of the output, no token lost or repeated. Then
    they raise the UnavailableError of the loss; RequestLostError if the server does not have the rest any more. The
    server keeps their requests for twice that time, so those of a program that dies run on for so long. With 0, and
    before the server has been reached once, a lost connection is an error at once.

    `tls`: how it proves who it is, and whom it trusts; without it, CADENZA_TLS_CA and so on say so; False,
    or none of them set: plain text. Its files are read again when they change. Raises OptionError for files that cannot
    be used.
    """

    def __init__(
        self,
        target: str = f"127.0.0.1:{SCHEDULER_PORT}",
        *,
        model: str | None = None,
        token: str | None = None,
        insecure: bool = False,
        reconnect_timeout_s: float = RECONNECT_TIMEOUT_S,
        tls: TLS | Literal[False] | None = None,
    ) -> None:
        shorten_interrupts()
        self._reconnect_timeout_s = checked_timeout(reconnect_timeout_s)
        self._was_reached = False
        self._is_given_up: Callable[[], bool] = lambda: False
        host, port = parse_address(target, default_port=SCHEDULER_PORT)
        self.target = format_address(host, port)
        self._tls = client_tls(tls)
        self._files = client_files(self._tls)
        token = chosen_token(token)
        check_connection(host, token, has_tls=self._tls is not None, insecure=insecure)
        self._metadata = call_metadata(token, checked_model(model))
        self._generation: generation_pb2_grpc.GenerationServiceAsyncStub | None = None
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the channel's
        self._running: set[RequestStream | SessionBatch] = set()
        self._closed = False

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel running calls, abort their requests and close the connection; a second call does nothing."""
        self._closed = True
        # Closing the channel ends only calls that are being awaited, and a paused generator is not awaited.
        await asyncio.gather(*(each.leave() for each in self._running))
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        enable_prefix_caching: bool = True,
        speculation: int | None = None,
        adapter: Adapters = None,
    ) -> list[RequestOutput]:
        """Complete prompts, as text or token ids, without a chat template; returns results in the order of prompts.

        All prompts run over one stream, at most as many at once as the server's queue accepts; further prompts wait in
        the client. If some prompts fail, the others are finished first; then the first failing prompt's error is
        raised, with `prompt_index`, `errors` and `outputs`. Without `enable_prefix_caching` the prompts neither use nor
        fill the prefix cache. `speculation`: the most draft tokens of a step for each prompt, up to 64, if the server
        has speculative decoding; 0: none; None: as the server is set. With exact numerics it changes no token.
        `adapter`: the name of a LoRA adapter for all prompts, or a list with one, or None, for each.
        """
        return await self._run(parse_prompts(prompts), params, CallOptions(enable_prefix_caching, speculation, adapter))

    async def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: JsonObjects = None,
        documents: JsonObjects = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        enable_prefix_caching: bool = True,
        speculation: int | None = None,
        adapter: Adapters = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many with the model's chat template; always returns a list, as in vLLM.

        A message is one of OpenAI's, with `tool_calls`, `tool_call_id` and so on where it has them, or a ChatMessage;
        `tools` are functions that it may call, in OpenAI's form (docs/chats.md). `add_generation_prompt=True` begins
        the assistant's turn; to continue the last message instead of answering it, set it to False and
        `continue_final_message` to True. The rest is as in `generate`.
        """
        rendering = chat_options(
            add_generation_prompt, continue_final_message, tools, documents, chat_template_kwargs, chat_template
        )
        chats = parse_chats(messages, rendering)
        return await self._run(chats, params, CallOptions(enable_prefix_caching, speculation, adapter))

    def stream(
        self,
        prompt: SinglePrompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        enable_prefix_caching: bool = True,
        speculation: int | None = None,
        adapter: Adapter = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt and yield deltas: each holds only text, tokens and logprobs that are new.

        The request starts when the first delta is requested. Raises QueueFullError when the server's queue is full.
        """
        options = CallOptions(enable_prefix_caching, speculation, adapter)
        return self._stream(parse_prompt(prompt), match_params(params, 1)[0], parse_request_id(request_id), options)

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: JsonObjects = None,
        documents: JsonObjects = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        enable_prefix_caching: bool = True,
        speculation: int | None = None,
        adapter: Adapter = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation as `chat` does, and yield deltas as `stream` does."""
        rendering = chat_options(
            add_generation_prompt, continue_final_message, tools, documents, chat_template_kwargs, chat_template
        )
        prompt = parse_chat(messages, rendering)
        options = CallOptions(enable_prefix_caching, speculation, adapter)
        return self._stream(prompt, match_params(params, 1)[0], parse_request_id(request_id), options)

    async def tokenize(
        self,
        prompt: str | Messages,
        add_special_tokens: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: JsonObjects = None,
        documents: JsonObjects = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[int]:
        """Token ids of a text, with the model's special tokens if requested, or of a chat with its template applied."""
        rendering = chat_options(
            add_generation_prompt, continue_final_message, tools, documents, chat_template_kwargs, chat_template
        )
        parsed = parse_text_or_chat(prompt, rendering)
        request = generation_pb2.TokenizeRequest(
            prompt=[convert.prompt_to_proto(parsed)], add_special_tokens=add_special_tokens
        )
        return list((await self._call(self._stub().Tokenize(request))).token_ids)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; invalid UTF-8 becomes U+FFFD."""
        request = generation_pb2.DetokenizeRequest(
            token_ids=parse_token_ids(token_ids), skip_special_tokens=skip_special_tokens
        )
        return (await self._call(self._stub().Detokenize(request))).text

    async def _tokenizer_files(self) -> dict[str, bytes]:
        """The files of the model's tokenizer by name, as transformers loads them from a folder."""

        async def read() -> dict[str, bytes]:
            found: dict[str, bytearray] = {}
            async for piece in self._stub().GetTokenizerFiles(generation_pb2.GetTokenizerFilesRequest()):
                found.setdefault(piece.name, bytearray()).extend(piece.data)
            return {name: bytes(content) for name, content in found.items()}

        return await self._call(read())

    async def abort(self, request_id: str) -> bool:
        """End a request at once; False if no such request was running."""
        request = generation_pb2.AbortRequest(request_id=parse_request_id(request_id))
        response = await self._call(self._stub().Abort(request))
        return response.aborted

    async def model_info(self) -> ModelInfo:
        """Describe the served model."""
        response = await self._call(self._stub().GetModelInfo(generation_pb2.GetModelInfoRequest()))
        return convert.model_info_from_proto(response)

    async def server_info(self) -> ServerInfo:
        """Describe the server: its options, load and executors."""
        response = await self._call(self._stub().GetServerInfo(generation_pb2.GetServerInfoRequest()))
        return convert.server_info_from_proto(response)

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Give a LoRA adapter's folder, where the executors run, a name; returns once an executor has loaded it."""
        stub: Any = self.stub_of(AdminServiceStub)
        request = admin_pb2.LoadAdapterRequest(name=adapter_name(name), path=path)
        return adapter_from_proto((await self._call(stub.LoadAdapter(request))).adapter)

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter's name away; its requests go on."""
        stub: Any = self.stub_of(AdminServiceStub)
        await self._call(stub.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name=adapter_name(name))))

    async def adapters(self) -> list[AdapterInfo]:
        """The LoRA adapters of the server."""
        stub: Any = self.stub_of(AdminServiceStub)
        found = await self._call(stub.ListAdapters(admin_pb2.ListAdaptersRequest()))
        return [adapter_from_proto(each) for each in found.adapters]

    @property
    def channel(self) -> grpc.aio.Channel:
        """The connection, for stubs without a token on the same server (health, reflection); others: `stub_of`."""
        if self._closed:
            raise UnavailableError("the client is closed")
        claim_grpc()
        loop = _running_loop()
        if self._channel is None:
            self._channel, self._loop = aio_channel(self.target, self._files), loop
        elif None is not self._loop is not loop:
            raise RuntimeError("this AsyncClient belongs to another event loop: make one for each")
        return self._channel

    def stub_of(self, service: Callable[[grpc.aio.Channel], Any]) -> Any:
        """A stub on this connection, whose calls carry the token: `client.stub_of(AdminServiceStub)`."""
        return authorized(service(self.channel), self._metadata)

    def _stub(self) -> generation_pb2_grpc.GenerationServiceAsyncStub:
        self.channel  # noqa: B018  # raises for a closed client, and in another event loop
        if self._generation is None:
            self._generation = self.stub_of(generation_pb2_grpc.GenerationServiceStub)
        return self._generation

    async def _run(
        self, prompts: list[Prompt], params: Params, options: CallOptions, on_output: OnOutput | None = None
    ) -> list[RequestOutput]:
        items = []
        matched = zip(match_params(params, len(prompts)), options.adapters(len(prompts)), strict=True)
        for prompt, (each, adapter) in zip(prompts, matched, strict=True):
            request = self._request(_new_id(), prompt, each, options, adapter, final=True)
            items.append(BatchItem(request, OutputCollector(request.request_id, prompt)))
        batch = SessionBatch(self._stub(), self.target, items, self._attempts(), on_output)
        self._running.add(batch)
        try:
            async with self._explained():
                await batch.run()
        finally:
            self._running.discard(batch)
        return batch_results(items)

    async def _stream(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, options: CallOptions
    ) -> AsyncGenerator[RequestOutput, None]:
        adapter = options.adapters(1)[0]
        request = self._request(request_id or _new_id(), prompt, params, options, adapter, final=False)
        collector = OutputCollector(request.request_id, prompt)
        stream = RequestStream(self._stub(), self.target, request, collector, self._attempts())
        self._running.add(stream)
        try:
            async with self._explained():
                while (delta := await stream.next()) is not None:
                    yield delta
        finally:
            self._running.discard(stream)
            await stream.leave()

    def _request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, options: CallOptions, adapter: str, final: bool
    ) -> generation_pb2.GenerateRequest:
        grace = grace_s(self._reconnect_timeout_s)
        return convert.request_to_proto(
            request_id, prompt, params, final_only=final, options=options, adapter=adapter, resume_grace_s=grace
        )

    def _attempts(self) -> Attempts:
        return Attempts(self._reconnect_timeout_s, self._keeps_trying, self._on_response)

    def _keeps_trying(self) -> bool:
        """Whether there is a point in waiting for the server: not if its address may be wrong."""
        return self._was_reached and not self._closed and not self._is_given_up()

    def _expect_server(self, is_given_up: Callable[[], bool]) -> None:
        """For `LLM`: the server is at its address, and comes back after a loss unless it is given up."""
        self._was_reached = True
        self._is_given_up = is_given_up

    def _on_response(self) -> None:
        self._was_reached = True

    async def _call(self, call: Awaitable[T]) -> T:
        async with self._explained():
            response = await call
        self._was_reached = True
        return response

    @contextlib.asynccontextmanager
    async def _explained(self) -> AsyncGenerator[None, None]:
        """Convert an exception that ends a call to a CadenzaError."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise await explained_unavailable(from_rpc_error(error, self.target), self.target, self._tls) from None
        except UnavailableError as error:
            if self._closed:  # while it waited for the server
                raise _closed_during_call() from None
            raise await explained_unavailable(error, self.target, self._tls) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if (
                self._closed and task is not None and not task.cancelling()
            ):  # cancelled by `close`, not by the caller's task
                raise _closed_during_call() from None
            raise


def _running_loop() -> asyncio.AbstractEventLoop | None:
    with contextlib.suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


def _closed_during_call() -> UnavailableError:
    return UnavailableError("the client was closed during the call")


def _new_id() -> str:
    return uuid.uuid4().hex
