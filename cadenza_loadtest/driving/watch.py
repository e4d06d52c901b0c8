"""Records a server's steps while a load runs, in columns and on the run's clock."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np

from cadenza.async_client import AsyncClient
from cadenza.errors import InternalError, from_rpc_error
from cadenza.v1 import admin_pb2
from cadenza.v1.admin_pb2_grpc import AdminServiceStub
from cadenza_loadtest.driving.target import Clock
from cadenza_loadtest.measures.columns import StepColumns

_QUIET_S = 0.05
_LAST_RECORDS_S = 1.0
_INTS = (
    "executor",
    "num_sequences",
    "num_tokens",
    "num_sampled",
    "num_waiting",
    "num_running",
    "num_swapped",
    "num_used_blocks",
    "num_blocks",
    "num_stored_tokens",
    "num_preempted",
)
_NUM_FIELDS = 3 + len(_INTS)


class StepSeries:
    """The steps since the watch began: about 110 bytes each.

    The server's timestamps are on its own clock. A record arrives after its step was applied, so for no message is the
    difference of arrival and newest timestamp less than the true offset of the clocks. The smallest difference, that of
    the fastest message, is used as the offset (as in Cristian, "Probabilistic clock synchronization", 1989,
    https://doi.org/10.1007/BF01784024, but one way only): steps appear later by that message's transit time, about 0.1
    ms on one machine.
    """

    def __init__(self) -> None:
        self.error = ""
        """The status code with which the watch broke; later steps are missing."""
        self._rows = array("d")
        self._offset_s = float("inf")
        self._num_dropped = 0
        self._start_s: float | None = None
        self._received = asyncio.Event()

    def begin(self, start_s: float) -> None:
        """The run begins at this clock reading; steps applied earlier do not count."""
        self._start_s = start_s

    def add(self, message: admin_pb2.WatchStepsResponse, now_s: float) -> None:
        """Add the records of a message received at `now_s`."""
        self._num_dropped = message.num_dropped
        for record in message.records:
            load = record.load
            self._rows.extend(
                (
                    record.planned_ns,
                    record.applied_ns,
                    record.timings.device_ns,
                    record.executor_index,
                    len(record.sequence_ids),
                    sum(record.num_tokens),
                    sum(record.num_sampled),
                    load.num_waiting,
                    load.num_running,
                    load.num_swapped,
                    load.num_used_blocks,
                    load.num_blocks,
                    load.num_stored_tokens,
                    len(record.preempted_ids),
                )
            )
        if message.records:
            self._offset_s = min(self._offset_s, now_s - message.records[-1].applied_ns / 1e9)
            self._received.set()

    def columns(self) -> StepColumns:
        """All steps so far, in seconds since the run's start; since the clock's zero if `begin` was not called."""
        rows = np.array(self._rows, np.float64).reshape(-1, _NUM_FIELDS)
        shift_s = (self._offset_s if len(rows) else 0.0) - (self._start_s or 0.0)
        if self._start_s is not None:
            rows = rows[rows[:, 1] / 1e9 + shift_s >= 0]
        counts: dict[str, Any] = {name: rows[:, 3 + place].astype(np.int64) for place, name in enumerate(_INTS)}
        return StepColumns(
            planned_s=rows[:, 0] / 1e9 + shift_s,
            applied_s=rows[:, 1] / 1e9 + shift_s,
            device_s=rows[:, 2] / 1e9,
            num_dropped=self._num_dropped,
            **counts,
        )

    async def settle(self) -> None:
        """Wait for records in transit: until none has arrived for a moment, at most a second."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_RECORDS_S):
                while not self.error:
                    self._received.clear()
                    async with asyncio.timeout(_QUIET_S):
                        await self._received.wait()


@contextlib.asynccontextmanager
async def watch_series(address: str, *, clock: Clock = time.perf_counter) -> AsyncIterator[StepSeries]:
    """Watch a server's steps on a separate connection; the watch is established before the body begins.

    Pass `begin` of the yielded series to the driver as `on_start`; `columns` may be called during and after the body.
    Raises CadenzaError if the watch cannot be established; if it breaks later, `error` is set and the run continues.
    """
    series = StepSeries()
    async with AsyncClient(address) as client:
        stub: Any = client.stub_of(AdminServiceStub)
        call = stub.WatchSteps(admin_pb2.WatchStepsRequest())
        reader: asyncio.Task[None] | None = None
        try:
            try:
                if await call.read() is grpc.aio.EOF:
                    raise InternalError(f"{client.target} ended the watch of steps at once")
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, client.target) from None
            reader = asyncio.create_task(_read(call, series, clock))
            yield series
            await series.settle()
        finally:
            # An abandoned aio call is never collected and its handler runs on (grpc#43462).
            call.cancel()
            if reader is not None:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)


async def _read(call: Any, series: StepSeries, clock: Clock) -> None:
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            series.add(message, clock())
        series.error = "UNAVAILABLE"
    except grpc.aio.AioRpcError as error:
        series.error = error.code().name
