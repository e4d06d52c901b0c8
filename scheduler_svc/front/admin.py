"""AdminService: step records, block tables, draining, executors, metrics."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

from cadenza.v1 import admin_pb2 as pb
from cadenza.v1 import admin_pb2_grpc as pb_grpc
from cadenza_common.serving.slices import run_in_slices
from scheduler_svc.convert import admin as convert
from scheduler_svc.convert.errors import NotServingError
from scheduler_svc.convert.kv_events import KvMessages
from scheduler_svc.convert.limits import check_limits, check_request_id
from scheduler_svc.core.errors import RequestRejectedError, UnknownRequestError
from scheduler_svc.engine.adapters.adapters import NamedAdapter
from scheduler_svc.executors.addresses import executor_address, is_same_listener
from scheduler_svc.front.adapter_paths import adapter_name, adapter_path
from scheduler_svc.front.front import Front, abort_with
from scheduler_svc.front.metrics import SchedulerMetrics
from scheduler_svc.tenants.errors import AdapterForbiddenError
from scheduler_svc.tenants.registry import Caller

_T = TypeVar("_T")
_MAX_INTERVAL_S = 1.0
"""Longest pause of a watch, in which it must not come to hold more records than it may."""
_OfExecutor = pb.AddExecutorRequest | pb.DrainExecutorRequest | pb.ResumeExecutorRequest | pb.RemoveExecutorRequest


class AdminServicer(pb_grpc.AdminServiceServicer):
    """Step records, block tables, draining, executors, metrics."""

    def __init__(self, front: Front, metrics: SchedulerMetrics) -> None:
        self._front = front
        self._metrics = metrics
        self._kv_messages = KvMessages(front.engine.adapters.names_by_hash)

    async def WatchSteps(self, request: pb.WatchStepsRequest, context: Any) -> None:  # type: ignore[override]
        """Stream step records from now on."""
        try:
            self._front.check_serving()
            caller = self._front.caller_of(context)
            min_interval_s = _min_interval_s(request)
            await self._until_stop(self._watch(request.include_block_tables, min_interval_s, caller, context))
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
        return await run_in_slices(convert.block_table_response(tables))

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        """Reject new requests; returns when all others have finished, or at the timeout."""
        try:
            self._front.check_serving()
            timeout_s = _timeout_s(request)
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

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Any) -> pb.GetMetricsResponse:
        """The metrics, as a scrape gets them."""
        try:
            self._front.check_serving()
            text = await self._metrics.text()
        except Exception as exc:
            await abort_with(context, exc)
        return pb.GetMetricsResponse(text=text)

    async def SubscribeKvEvents(self, request: pb.SubscribeKvEventsRequest, context: Any) -> None:  # type: ignore[override]
        """Stream what the prefix caches hold."""
        try:
            self._front.check_serving()
            caller = self._front.caller_of(context)
            await self._until_stop(self._send_kv_events(request.start_sequence_number, caller, context))
        except Exception as exc:
            await abort_with(context, exc)

    async def FlushPrefixCache(self, request: pb.FlushPrefixCacheRequest, context: Any) -> pb.FlushPrefixCacheResponse:
        """Empty the prefix caches."""
        try:
            self._front.check_serving()
            num_blocks = await self._front.engine.kv_events.flush()
        except Exception as exc:
            await abort_with(context, exc)
        return pb.FlushPrefixCacheResponse(num_blocks=num_blocks)

    async def AddExecutor(self, request: pb.AddExecutorRequest, context: Any) -> pb.AddExecutorResponse:
        """Add an executor; returns before it has answered."""
        try:
            self._front.check_serving()
            target = _target(request)
            if is_same_listener(target, self._front.address):
                raise RequestRejectedError("target", f"{target} is this scheduler's own address, not an executor's")
            self._front.engine.executors.add(target)
        except Exception as exc:
            await abort_with(context, exc)
        return pb.AddExecutorResponse()

    async def DrainExecutor(self, request: pb.DrainExecutorRequest, context: Any) -> pb.DrainExecutorResponse:
        """Give an executor no new requests; returns when it holds none, or at the timeout."""
        try:
            self._front.check_serving()
            timeout_s = _timeout_s(request)
            num_remaining = await self._until_stop(self._front.engine.executors.drain(_target(request), timeout_s))
        except Exception as exc:
            await abort_with(context, exc)
        return pb.DrainExecutorResponse(num_remaining=num_remaining)

    async def ResumeExecutor(self, request: pb.ResumeExecutorRequest, context: Any) -> pb.ResumeExecutorResponse:
        """Let a draining executor take requests again."""
        try:
            self._front.check_serving()
            self._front.engine.executors.resume(_target(request))
        except Exception as exc:
            await abort_with(context, exc)
        return pb.ResumeExecutorResponse()

    async def RemoveExecutor(self, request: pb.RemoveExecutorRequest, context: Any) -> pb.RemoveExecutorResponse:
        """End the session with an executor and forget it. The removal goes on if the caller leaves."""
        try:
            self._front.check_serving()
            await self._front.engine.executors.remove(_target(request))
        except Exception as exc:
            await abort_with(context, exc)
        return pb.RemoveExecutorResponse()

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Any) -> pb.LoadAdapterResponse:
        """Give an adapter a name; returns once an executor has loaded it. The load goes on if the caller leaves."""
        try:
            self._front.check_serving()
            check_limits(request)
            self._check_loader(request.name, context)
            name, path = adapter_name(request.name), adapter_path(request.path, self._front.config.lora_root)
            engine = self._front.engine
            engine.adapters.load(name, path)
            engine.executors.wake()
            info = await self._until_stop(engine.adapters.loaded(name))
            await engine.journal.flushed()
        except Exception as exc:
            await abort_with(context, exc)
        return pb.LoadAdapterResponse(adapter=self._adapter(info))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Any) -> pb.UnloadAdapterResponse:
        """Take an adapter's name away; its requests go on."""
        try:
            self._front.check_serving()
            check_limits(request)
            self._check_loader(request.name, context)
            self._front.engine.adapters.unload(request.name)
            self._front.engine.executors.wake()
            await self._front.engine.journal.flushed()
        except Exception as exc:
            await abort_with(context, exc)
        return pb.UnloadAdapterResponse()

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Any) -> pb.ListAdaptersResponse:
        """List the named adapters that the tenant may load."""
        try:
            self._front.check_serving()
            tenant = self._front.caller_of(context).tenant()
        except Exception as exc:
            await abort_with(context, exc)
        infos = [each for each in self._front.engine.adapters.infos() if tenant.may_load_adapter(each.name)]
        return pb.ListAdaptersResponse(adapters=map(self._adapter, infos))

    def _check_loader(self, name: str, context: Any) -> None:
        """Raise AdapterForbiddenError if the tenant may not load and unload adapters of this name."""
        if not self._front.caller_of(context).tenant().may_load_adapter(name):
            raise AdapterForbiddenError(name, "name")

    def _adapter(self, info: NamedAdapter) -> pb.AdapterInfo:
        return convert.adapter_info(info, self._front.engine.executor_infos())

    async def _watch(self, include_block_tables: bool, min_interval_s: float, caller: Caller, context: Any) -> None:
        """Stream records until the caller leaves, or its token is revoked: unlike others, this stream has no end."""
        async with self._front.engine.watch(include_block_tables=include_block_tables) as watch:
            async for records, num_dropped in watch:
                caller.check_admin()
                work = convert.watch_response(records, num_dropped, block_tables=include_block_tables)
                await context.write(await run_in_slices(work))
                if min_interval_s and records and not watch.has_records:
                    await asyncio.sleep(min_interval_s)

    async def _send_kv_events(self, start: int, caller: Caller, context: Any) -> None:
        """Stream batches as `_watch`."""
        subscription = self._front.engine.kv_events.subscribe(start)
        try:
            async for batch in subscription:
                caller.check_admin()
                await context.write(await self._kv_messages.message(batch))
        finally:
            subscription.close()

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


def _min_interval_s(request: pb.WatchStepsRequest) -> float:
    if not 0 <= request.min_interval_s <= _MAX_INTERVAL_S:
        message = f"must be 0 to {_MAX_INTERVAL_S:g} seconds, not {request.min_interval_s}"
        raise RequestRejectedError("min_interval_s", message)
    return request.min_interval_s


def _timeout_s(request: pb.DrainRequest | pb.DrainExecutorRequest) -> float | None:
    timeout_s = request.timeout_s if request.HasField("timeout_s") else None
    if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s >= 0):
        raise RequestRejectedError("timeout_s", f"must be 0 or more seconds, not {timeout_s}")
    return timeout_s


def _target(request: _OfExecutor) -> str:
    """The address in the form of ExecutorInfo; raises RequestRejectedError."""
    try:
        return executor_address(request.target)
    except ValueError as exc:
        raise RequestRejectedError("target", str(exc)) from exc
