"""AdminService: step records, block tables, draining."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

from cadenza.v1 import admin_pb2 as pb
from cadenza.v1 import admin_pb2_grpc as pb_grpc
from scheduler_svc.convert import admin as convert
from scheduler_svc.convert.errors import NotServingError
from scheduler_svc.convert.limits import check_limits, check_request_id
from scheduler_svc.core.errors import RequestRejectedError, UnknownRequestError
from scheduler_svc.front.front import Front, abort_with

_T = TypeVar("_T")


class AdminServicer(pb_grpc.AdminServiceServicer):
    """Step records, block tables, draining."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def WatchSteps(self, request: pb.WatchStepsRequest, context: Any) -> None:  # type: ignore[override]
        """Stream step records from now on."""
        try:
            self._front.check_serving()
            await self._until_stop(self._watch(request.include_block_tables, context))
        except Exception as exc:
            await abort_with(context, exc)

    async def GetBlockTable(self, request: pb.GetBlockTableRequest, context: Any) -> pb.GetBlockTableResponse:
        """The block tables of a request's unfinished sequences."""
        try:
            self._front.check_serving()
            check_request_id(request.request_id)
            check_limits(request)
            tables = self._front.engine.block_tables(request.tenant, request.request_id)
            if tables is None:
                raise UnknownRequestError(f"no request {request.request_id!r} of tenant {request.tenant!r} is running")
        except Exception as exc:
            await abort_with(context, exc)
        return convert.block_table_response(tables)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        """Reject new requests; returns when all others have finished, or at the timeout."""
        timeout_s = request.timeout_s if request.HasField("timeout_s") else None
        try:
            self._front.check_serving()
            if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s >= 0):
                raise RequestRejectedError("timeout_s", f"must be 0 or more seconds, not {timeout_s}")
            num_remaining = await self._until_stop(self._front.engine.drain(timeout_s))
        except Exception as exc:
            await abort_with(context, exc)
        return pb.DrainResponse(num_remaining=num_remaining)

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        """Accept new requests again."""
        try:
            self._front.check_serving()
            if self._front.is_leaving:
                raise NotServingError("the service is stopping")
        except NotServingError as exc:
            await abort_with(context, exc)
        self._front.engine.resume()
        return pb.ResumeResponse()

    async def _watch(self, include_block_tables: bool, context: Any) -> None:
        async with self._front.engine.watch(include_block_tables=include_block_tables) as watch:
            async for records, num_dropped in watch:
                await context.write(convert.watch_response(records, num_dropped, block_tables=include_block_tables))

    async def _until_stop(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The work's result; raises NotServingError if the service stops first."""
        wake = asyncio.Event()
        working, stopping = asyncio.create_task(work), asyncio.create_task(wake.wait())
        try:
            with self._front.stream(wake, is_client=False):
                await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
                if not working.done():
                    self._front.check_serving()
                return await working
        finally:
            working.cancel()
            stopping.cancel()
