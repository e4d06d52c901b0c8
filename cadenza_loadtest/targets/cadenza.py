"""Cadenza over Generate, one call for each request; and what it has in common with a session.

Connecting, facts, requests and responses are the common part.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import tomllib
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import grpc

from cadenza.async_client import AsyncClient
from cadenza.credentials import chosen_token
from cadenza.errors import OptionError
from cadenza.v1 import generation_pb2, types_pb2
from cadenza.v1.generation_pb2_grpc import GenerationServiceStub
from cadenza_common.wire.transport import MAX_REQUEST_BYTES
from cadenza_loadtest.driving.live import INCOMPLETE, RequestInFlight
from cadenza_loadtest.driving.target import Clock, ExecutorFacts, ServerFacts
from cadenza_loadtest.requests import LoadTestError, RequestShape

TOO_LARGE = "MESSAGE_TOO_LARGE"
"""The request exceeds gRPC's message limit and was not sent."""
_COMPLETE = (types_pb2.FINISH_DETAIL_MAX_TOKENS, types_pb2.FINISH_DETAIL_EOS)
"""Details of a completed request; EOS ends a beam."""


class CadenzaTarget:
    """A Cadenza server over one or several connections, which requests use in turn.

    Outputs have the length of the shape: EOS is ignored. They are token ids only, unless a session continues with an
    answer's text. `temperature` 0 is greedy; requests with n over 1 must sample and use temperature 1 then. Each
    request's sampling seed follows from `seed` and its index. With `tenant_tokens` a tenant's requests have connections
    of their own with its token; without, all requests are this user's.
    """

    api = ""

    def __init__(
        self,
        address: str,
        *,
        connections: int = 1,
        temperature: float = 0.0,
        seed: int = 0,
        clock: Clock = time.perf_counter,
        tenant_tokens: Mapping[str, str] | None = None,
    ) -> None:
        own = chosen_token(None) or next(iter((tenant_tokens or {}).values()), None)
        self._clients = [AsyncClient(address, token=own) for _ in range(connections)]
        self._turns_of: dict[str, Iterator[int]] = {}
        for name, token in (tenant_tokens or {}).items():
            first = len(self._clients)
            self._clients += [AsyncClient(address, token=token) for _ in range(connections)]
            self._turns_of[name] = itertools.cycle(range(first, first + connections))
        self._temperature = temperature
        self._seed = seed
        self._clock = clock
        self._cache_salt = b""
        self._stubs: list[Any] = []
        self._turns = itertools.cycle(range(connections))
        # Request ids must differ from those of other clients.
        self._ids = (f"{uuid.uuid4().hex[:12]}-{number}" for number in itertools.count())

    async def start(self) -> ServerFacts:
        """Connect; raises CadenzaError if the server cannot be reached."""
        client = self._clients[0]
        model, server = await client.model_info(), await client.server_info()
        await asyncio.gather(*(each.model_info() for each in self._clients[1:]))
        self._stubs = [each.stub_of(GenerationServiceStub) for each in self._clients]
        return ServerFacts(
            kind="cadenza",
            api=self.api,
            target=client.target,
            model=model.model,
            version=server.version,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            has_tokenizer=model.has_tokenizer,
            num_parameters=model.num_parameters,
            dtype=model.dtype,
            fingerprint=model.fingerprint.hex(),
            options=server.options,
            executors=tuple(ExecutorFacts(each.target, each.device, each.block_size) for each in server.executors),
        )

    def new_run(self) -> None:
        """Set a new cache salt: only requests with the same salt share blocks."""
        self._cache_salt = uuid.uuid4().bytes

    async def close(self) -> None:
        """Disconnect."""
        for client in self._clients:
            await client.close()

    def _place(self, shape: RequestShape) -> int:
        """The index of the connection of this request; raises LoadTestError for a tenant without a token."""
        if not self._turns_of or not shape.tenant:
            return next(self._turns)
        if shape.tenant not in self._turns_of:
            raise LoadTestError(f"--tenant-tokens has no token of tenant {shape.tenant}")
        return next(self._turns_of[shape.tenant])

    def _request(
        self, shape: RequestShape, prompt: list[int] | str, live: RequestInFlight
    ) -> generation_pb2.GenerateRequest:
        if isinstance(prompt, str):
            part = types_pb2.PromptPart(text=prompt)
        else:
            part = types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=prompt))
        params = types_pb2.SamplingParams(
            temperature=self._temperature,
            seed=(self._seed << 32 | shape.index) % 2**64,
            max_tokens=shape.num_output_tokens,
            ignore_eos=True,
            detokenize=live.keep_output and isinstance(prompt, str),
        )
        if shape.beam_width:
            params.beam_width = shape.beam_width
            params.temperature = 0.0  # beam search samples nothing
        elif shape.n > 1:
            params.n = shape.n
            params.temperature = self._temperature or 1.0
        return generation_pb2.GenerateRequest(
            request_id=next(self._ids),
            prompt=[part],
            sampling_params=params,
            cache_salt=self._cache_salt,
            adapter=shape.adapter,
        )


def take_response(live: RequestInFlight, response: generation_pb2.GenerateResponse, now_s: float) -> bool:
    """Apply a response received at `now_s` to its request; returns whether it was the last one."""
    count = 0
    for output in response.outputs:
        count += len(output.token_ids)
        if live.keep_output and not output.sample_index:
            live.output_ids.extend(output.token_ids)
            live.output_text.append(output.text)
        if output.HasField("finish") and output.finish.detail not in _COMPLETE:
            live.failed(types_pb2.FinishDetail.Name(output.finish.detail).removeprefix("FINISH_DETAIL_"))
    if count:
        live.tokens(now_s, count)
    if response.HasField("info"):
        live.num_prompt_tokens = response.info.num_prompt_tokens
    if not response.HasField("stats"):
        return False
    stats = response.stats
    live.num_prompt_tokens = stats.num_prompt_tokens
    live.num_cached_tokens = stats.num_cached_tokens
    live.num_preemptions = stats.num_preemptions
    if stats.first_token_ns:
        live.queue_s = stats.queue_ns / 1e9
        live.server_first_s = stats.first_token_ns / 1e9
    live.server_total_s = stats.total_ns / 1e9
    return True


class GenerateTarget(CadenzaTarget):
    """One stream for each request; a connection carries any number of them."""

    api = "generate"

    async def run(self, shape: RequestShape, prompt: list[int] | str, live: RequestInFlight) -> None:
        """See Target."""
        request = self._request(shape, prompt, live)
        if request.ByteSize() > MAX_REQUEST_BYTES:
            live.failed(TOO_LARGE)
            return
        stub = self._stubs[self._place(shape)]
        live.sent_s = self._clock()
        call = stub.Generate(request)
        is_last = False
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                is_last = take_response(live, response, self._clock())
            if not is_last:
                live.failed(INCOMPLETE)
        except grpc.aio.AioRpcError as error:
            live.failed(error.code().name, error.details() or "")
        finally:
            # An abandoned aio call is never collected and its handler runs on (grpc#43462).
            call.cancel()


def read_tenant_tokens(path: str) -> Mapping[str, str]:
    """The token of each tenant, from the table [tokens] of a TOML file; raises LoadTestError, which shows no token."""
    where = f"--tenant-tokens {path}"
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise LoadTestError(f"{where}: {(error.strerror or str(error)).lower()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise LoadTestError(f"{where}: this is not TOML") from None
    tokens = tables.get("tokens")
    if not isinstance(tokens, dict) or len(tables) != 1:
        raise LoadTestError(f'{where}: must have one table, [tokens], with lines NAME = "TOKEN"')
    for name, token in tokens.items():
        try:
            chosen_token(token)
        except OptionError:
            raise LoadTestError(f"{where}: [tokens] {name}: is no token") from None
    return tokens
