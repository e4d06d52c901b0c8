"""The blocking client: AsyncClient on a background event loop."""

from __future__ import annotations

import sys
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from cadenza.adapters import Adapter, AdapterInfo, Adapters
from cadenza.async_client import AsyncClient
from cadenza.calls.batch import OnOutput
from cadenza.calls.loop_thread import LoopThread
from cadenza.calls.reconnect import RECONNECT_TIMEOUT_S
from cadenza.calls.short_interrupts import quiet_at_exit, shorten_interrupts
from cadenza.chats import JsonObjects
from cadenza.info import ModelInfo, ServerInfo
from cadenza.outputs import RequestOutput
from cadenza.prompts import CallOptions, Messages, Params, Prompt, Prompts, SinglePrompt
from cadenza.sampling_params import SamplingParams
from cadenza_common.wire.tls import TLS
from cadenza_common.wire.transport import SCHEDULER_PORT


class Client:
    """A blocking client of one Cadenza server at `HOST:PORT`; may be used from several threads.

    It has the methods and errors of AsyncClient, and goes on after a lost connection as that does. Ctrl-C during a call
    aborts the call's requests and raises KeyboardInterrupt; if the program does not catch it, Python's report shows the
    program's own frames alone.
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
        self._loop = LoopThread.shared()
        self._client = AsyncClient(
            target,
            model=model,
            token=token,
            insecure=insecure,
            reconnect_timeout_s=reconnect_timeout_s,
            tls=tls,
        )
        self._finalizer = weakref.finalize(self, _close, self._loop, self._client)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def target(self) -> str:
        """The server's `HOST:PORT`."""
        return self._client.target

    def close(self) -> None:
        """Cancel running calls and close the connection; a second call does nothing."""
        self._finalizer()

    def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        enable_prefix_caching: bool = True,
        speculation: int | None = None,
        adapter: Adapters = None,
    ) -> list[RequestOutput]:
        """Complete prompts, without a chat template; see `AsyncClient.generate`."""
        return self._loop.call(
            lambda: self._client.generate(
                prompts,
                params,
                enable_prefix_caching=enable_prefix_caching,
                speculation=speculation,
                adapter=adapter,
            )
        )

    def chat(
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
        """Answer one conversation or many with the model's chat template; always returns a list; see
        `AsyncClient.chat`."""
        return self._loop.call(
            lambda: self._client.chat(
                messages,
                params,
                enable_prefix_caching=enable_prefix_caching,
                speculation=speculation,
                adapter=adapter,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                chat_template_kwargs=chat_template_kwargs,
                chat_template=chat_template,
            )
        )

    def stream(
        self,
        prompt: SinglePrompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        enable_prefix_caching: bool = True,
        speculation: int | None = None,
        adapter: Adapter = None,
    ) -> Generator[RequestOutput, None, None]:
        """Complete one prompt and yield deltas; closing or dropping the generator aborts the request."""
        deltas = self._client.stream(
            prompt,
            params,
            request_id,
            enable_prefix_caching=enable_prefix_caching,
            speculation=speculation,
            adapter=adapter,
        )
        return self._pull(deltas)

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
    ) -> Generator[RequestOutput, None, None]:
        """Answer one conversation and yield deltas; closing or dropping the generator aborts the request."""
        deltas = self._client.stream_chat(
            messages,
            params,
            request_id,
            enable_prefix_caching=enable_prefix_caching,
            speculation=speculation,
            adapter=adapter,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            chat_template_kwargs=chat_template_kwargs,
            chat_template=chat_template,
        )
        return self._pull(deltas)

    def tokenize(
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
        return self._loop.call(
            lambda: self._client.tokenize(
                prompt,
                add_special_tokens,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                chat_template_kwargs=chat_template_kwargs,
                chat_template=chat_template,
            )
        )

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; invalid UTF-8 becomes U+FFFD."""
        return self._loop.call(lambda: self._client.detokenize(token_ids, skip_special_tokens))

    def _tokenizer_files(self) -> dict[str, bytes]:
        return self._loop.call(lambda: self._client._tokenizer_files())

    def abort(self, request_id: str) -> bool:
        """End a request at once; False if no such request was running."""
        return self._loop.call(lambda: self._client.abort(request_id))

    def model_info(self) -> ModelInfo:
        """Describe the served model."""
        return self._loop.call(lambda: self._client.model_info())

    def server_info(self) -> ServerInfo:
        """Describe the server: its options, load and executors."""
        return self._loop.call(lambda: self._client.server_info())

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Give a LoRA adapter's folder a name; see `AsyncClient.load_adapter`."""
        return self._loop.call(lambda: self._client.load_adapter(name, path))

    def unload_adapter(self, name: str) -> None:
        """Take an adapter's name away; its requests go on."""
        self._loop.call(lambda: self._client.unload_adapter(name))

    def adapters(self) -> list[AdapterInfo]:
        """The LoRA adapters of the server."""
        return self._loop.call(lambda: self._client.adapters())

    def _run(
        self, prompts: list[Prompt], params: Params, options: CallOptions, on_output: OnOutput
    ) -> list[RequestOutput]:
        """Run parsed prompts for `LLM`; `on_output` gets each result on the background loop as it finishes."""
        return self._loop.call(lambda: self._client._run(prompts, params, options, on_output))

    def _expect_server(self, is_given_up: Callable[[], bool]) -> None:
        """For `LLM`; see AsyncClient."""
        self._client._expect_server(is_given_up)

    def _pull(self, deltas: AsyncGenerator[RequestOutput, None]) -> Generator[RequestOutput, None, None]:
        try:
            while (delta := self._loop.call(lambda: _next(deltas))) is not None:
                yield delta
        finally:
            # A generator that outlives the main program has no loop any more; its connection is closed. In a forked
            # child the loop is the parent's.
            if self._loop.lives and not sys.is_finalizing():
                self._loop.finish(_finish(deltas))


async def _next(deltas: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
    return await anext(deltas, None)


async def _finish(deltas: AsyncGenerator[RequestOutput, None]) -> None:
    await deltas.aclose()


def _close(loop: LoopThread, client: AsyncClient) -> None:
    if loop.lives:  # in a forked child the connection is the parent's
        with quiet_at_exit():
            loop.finish(client.close())
