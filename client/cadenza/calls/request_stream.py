"""One request's deltas, over as many calls as it takes to bring them all."""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from cadenza.calls.output_collector import OutputCollector
from cadenza.calls.reconnect import Attempts, Positions, is_lost_connection, whole_message
from cadenza.calls.session import abort_quietly
from cadenza.errors import DamagedStreamError, RequestLostError, UnavailableError, from_rpc_error
from cadenza.outputs import RequestOutput
from cadenza.v1 import generation_pb2, generation_pb2_grpc
from cadenza_common.telemetry.trace_context import current_metadata

_STATUS_TIMEOUT_S = 1.0


class RequestStream:
    """Reads one request to its end; after a lost connection it goes on from the next token.

    Until output has come, the request itself is sent again: the server knows it by its id and body, or starts it.
    """

    def __init__(
        self,
        stub: generation_pb2_grpc.GenerationServiceAsyncStub,
        target: str,
        request: generation_pb2.GenerateRequest,
        collector: OutputCollector,
        attempts: Attempts,
    ) -> None:
        self._stub = stub
        self._target = target
        self._request = request
        self._collector = collector
        self._attempts = attempts
        self._positions = Positions(request.request_id)
        self._metadata = current_metadata()
        self._call: grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse] | None
        self._call = None
        self._is_over = True
        """Whether the server has nothing to abort."""
        self._is_left = False

    async def next(self) -> RequestOutput | None:
        """The next delta; None after the last one.

        Raises the CadenzaError of a request that failed, RequestLostError, and UnavailableError after the time limit.
        """
        while not self._positions.finished:
            is_first = not (self._positions.has_responses or self._attempts.has_reconnected)
            try:
                response = await self._read()
                self._positions.advance(response)
            except grpc.aio.AioRpcError as error:
                await self._recover(error)
                continue
            except DamagedStreamError as damage:
                self._drop_call()
                self._attempts.on_damage()
                await self._attempts.wait(damage)
                continue
            self._attempts.on_response()
            delta = self._collector.add(response)
            # A stream that is resumed, or begun again, starts with a response without output.
            if is_first or delta.outputs or delta.prompt_logprobs or delta.finished:
                return delta
        await self._finish()
        return None

    async def leave(self) -> None:
        """End the call, and the request at the server unless it has ended; returns soon, whatever the server does."""
        self._is_left = True
        self._drop_call()
        if not self._is_over:
            self._is_over = True
            await abort_quietly(self._stub, [self._request.request_id])

    def _drop_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            # An abandoned aio call is never collected and its handler runs on (grpc#43462).
            call.cancel()

    async def _read(self) -> generation_pb2.GenerateResponse:
        if self._is_left:  # by `AsyncClient.close`, between two deltas
            raise UnavailableError(f"the stream of request {self._request.request_id} was closed")
        if self._call is None:
            message = self._positions.message(self._request, again=self._attempts.has_reconnected)
            self._call = self._stub.Generate(message, metadata=self._metadata)
            self._is_over = False
        return whole_message(
            await self._call.read(),
            generation_pb2.GenerateResponse,
            f"{self._target} ended the stream of request {self._request.request_id} unfinished",
        )

    async def _recover(self, error: grpc.aio.AioRpcError) -> None:
        """Wait for the next attempt; raises the error of a request that cannot go on."""
        self._drop_call()
        cause = from_rpc_error(error, self._target)
        if is_lost_connection(error) or self._attempts.takes_back(error.code()):
            await self._attempts.wait(cause)
            return
        self._is_over = True
        if self._positions.has_output and error.code() is grpc.StatusCode.NOT_FOUND:
            raise RequestLostError.forgotten(self._request.request_id, cause) from None
        raise cause from None

    async def _finish(self) -> None:
        """Read the status, so that the call ends by itself; all output is there already."""
        self._is_over = True
        if self._call is not None:
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                async with asyncio.timeout(_STATUS_TIMEOUT_S):
                    await self._call.read()
