"""The gateway's own look at the engine: records of its steps, and its state."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import grpc

from cadenza.calls.convert import server_info_from_proto
from cadenza.credentials import authorized, call_metadata
from cadenza.errors import from_rpc_error
from cadenza.info import ServerInfo
from cadenza.tls_client import explained_unavailable
from cadenza.v1 import admin_pb2, generation_pb2
from cadenza.v1.admin_pb2_grpc import AdminServiceStub
from cadenza.v1.generation_pb2_grpc import GenerationServiceStub
from cadenza_common.wire.tls import TLS

_CALL_TIMEOUT_S = 5.0
_INTERVAL_S = 0.2
"""Between messages with records: nobody sees more, and a message for each step would cost the scheduler more."""


class Watching:
    """Calls to one scheduler, with the right of the gateway's own token; they raise the CadenzaError of a failure."""

    def __init__(self, channel: grpc.aio.Channel, target: str, tls: TLS | None, token: str | None) -> None:
        metadata = call_metadata(token)
        self._generation: Any = authorized(GenerationServiceStub(channel), metadata)
        self._admin: Any = authorized(AdminServiceStub(channel), metadata)
        self._target, self._tls = target, tls

    async def server_info(self) -> ServerInfo:
        """The scheduler's state."""
        request = generation_pb2.GetServerInfoRequest()
        try:
            return server_info_from_proto(await self._generation.GetServerInfo(request, timeout=_CALL_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            raise await self._explained(error) from None

    async def steps(self) -> AsyncGenerator[admin_pb2.WatchStepsResponse, None]:
        """Records of steps from now on, with changes of block tables; the first message has none."""
        request = admin_pb2.WatchStepsRequest(include_block_tables=True, min_interval_s=_INTERVAL_S)
        call = self._admin.WatchSteps(request)
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                yield response
        except grpc.aio.AioRpcError as error:
            raise await self._explained(error) from None
        finally:
            call.cancel()  # an abandoned aio call is never collected and its handler runs on (grpc#43462)

    async def _explained(self, error: grpc.aio.AioRpcError) -> Exception:
        return await explained_unavailable(from_rpc_error(error, self._target), self._target, self._tls)
