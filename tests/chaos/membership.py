"""Faults of the set of executors: they drain, leave, join and come back, by calls and by the list that SIGHUP reads."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import Callable

import grpc
import psutil

from cadenza.v1 import admin_pb2 as pb
from cadenza.v1 import admin_pb2_grpc
from tests.chaos.schedule import Fault
from tests.chaos.services import SCHEDULER, Services

_LIMIT_S = 60.0
_AGAIN_S = 0.1
_CALL_S = 5.0
_TRY_LATER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class Membership:
    """Changes the set of executors for a while. Calls are repeated while the scheduler is away.

    A restarted scheduler forgets drains, additions and removals. So meanwhile health may be what it is without that
    executor, and no call fails because its work is done already.
    """

    def __init__(self, services: Services, report: Callable[[str], None]) -> None:
        """report: called with each violation."""
        self._services = services
        self._report = report
        self._unlisted: Counter[int] = Counter()

    async def drain(self, fault: Fault) -> None:
        """It drains, and takes requests again after a while."""
        reason = f"drained by fault {fault.number}"
        target = self._target(fault.executor)
        self._services.truth.begin(reason, fault.executor, must=False)
        await self._call("DrainExecutor", pb.DrainExecutorRequest(target=target, timeout_s=0.0))
        await asyncio.sleep(fault.duration_s)
        await self._call("ResumeExecutor", pb.ResumeExecutorRequest(target=target))
        self._services.truth.end(reason, fault.executor)

    async def remove_and_add(self, fault: Fault) -> None:
        """It is removed with all that it runs, and comes back after a while."""
        reason = f"removed by fault {fault.number}"
        target = self._target(fault.executor)
        self._services.truth.begin(reason, fault.executor, must=False)
        await self._call("RemoveExecutor", pb.RemoveExecutorRequest(target=target), may_be_last=True)
        await asyncio.sleep(fault.duration_s)
        await self._call("AddExecutor", pb.AddExecutorRequest(target=target))
        self._services.truth.end(reason, fault.executor)

    async def join_and_leave(self, fault: Fault) -> None:
        """The spare joins, and is removed after a while; drained before that in half of the cases."""
        spare = self._services.num_executors
        reason = f"joined by fault {fault.number}"
        target = self._target(spare)
        self._services.truth.begin(reason, spare, must=False)
        await self._call("AddExecutor", pb.AddExecutorRequest(target=target))
        await asyncio.sleep(fault.duration_s)
        if fault.draw < 0.5:
            await self._call("DrainExecutor", pb.DrainExecutorRequest(target=target, timeout_s=1.0))
        await self._call("RemoveExecutor", pb.RemoveExecutorRequest(target=target))
        self._services.truth.end(reason, spare)

    async def change_list(self, fault: Fault) -> None:
        """It is not in the list that SIGHUP reads again, and is there again after a while."""
        reason = f"not listed by fault {fault.number}"
        self._services.truth.begin(reason, fault.executor, must=False)
        self._list(fault.executor, 1)
        await asyncio.sleep(fault.duration_s)
        self._list(fault.executor, -1)
        self._services.truth.end(reason, fault.executor)

    def _list(self, executor: int, change: int) -> None:
        """Other faults may have taken the same executor out of the list."""
        self._unlisted[executor] += change
        self._services.write_list(without=+self._unlisted)
        process = self._services.process(SCHEDULER)
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGHUP)

    def _target(self, executor: int) -> str:
        return self._services.executor_links[executor].address

    async def _call(self, method: str, request: object, *, may_be_last: bool = False) -> None:
        """Call until it is done; may_be_last: a removal may be refused, otherwise it is repeated."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _LIMIT_S
        while True:
            try:
                async with grpc.aio.insecure_channel(self._services.target) as channel:
                    await getattr(admin_pb2_grpc.AdminServiceStub(channel), method)(request, timeout=_CALL_S)
                return
            except grpc.aio.AioRpcError as error:
                status, details = error.code(), error.details()
            self._services.history.write("call", method=method, status=status.name, details=details)
            is_last = method == "RemoveExecutor" and status is grpc.StatusCode.FAILED_PRECONDITION
            if _is_done(method, status) or (is_last and may_be_last):
                return
            if (status not in _TRY_LATER and not is_last) or loop.time() > deadline:
                self._report(f"{method} failed with {status.name}: {details}")
                return
            await asyncio.sleep(_AGAIN_S)


def _is_done(method: str, status: grpc.StatusCode) -> bool:
    """Whether another fault or a restart has done this."""
    return status is (grpc.StatusCode.ALREADY_EXISTS if method == "AddExecutor" else grpc.StatusCode.NOT_FOUND)
