"""Runs of the experiments on the real services, on this machine's CPU: one load after the other.

with Server(random_checkpoint("10m"), {"num_gpu_blocks": 200}) as server:
    columns = server.load(shapes, times)
    measure(columns, window=None, slo=None).e2e_s.p99
    columns, records = server.watched_load(shapes)
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from benchmarks.common.rows import BenchmarkError
from cadenza import AsyncClient, LocalServices
from cadenza.steps.watch import watch_steps
from cadenza.v1.admin_pb2 import StepRecord
from cadenza_loadtest.driving.driver import drive
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.requests import RequestShape
from cadenza_loadtest.targets.session import SessionTarget
from cadenza_loadtest.workloads.prompts import Prompts

_TIMEOUT_S = 300.0


class Server:
    """Both services on this machine, with these `options`, while it is open.

    The prefix cache is off unless `enable_prefix_caching` is given; otherwise each load would hit the previous one's
    prompts. So are drafts, which would be right where outputs repeat themselves.
    """

    def __init__(self, model: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        self._services = LocalServices(model, **{"enable_prefix_caching": False, "speculative": "off", **options})

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._services.close()

    def load(
        self,
        shapes: Sequence[RequestShape],
        times: Sequence[float] | None = None,
        *,
        seed: int = 0,
        keep_gaps: bool = False,
    ) -> RequestColumns:
        """Send these requests, due at `times` [n] in seconds (None: all at once), and return their outcomes.

        Raises BenchmarkError if one failed, because the numbers would not be comparable.
        """
        return asyncio.run(self._drive(_schedule(shapes, times), seed, keep_gaps))

    def watched_load(
        self, shapes: Sequence[RequestShape], times: Sequence[float] | None = None, *, seed: int = 0
    ) -> tuple[RequestColumns, list[StepRecord]]:
        """The same, with the step records of the scheduler in order.

        Raises BenchmarkError also if a record was lost.
        """
        return asyncio.run(self._watch(_schedule(shapes, times), seed))

    async def _watch(
        self, schedule: list[tuple[float, RequestShape]], seed: int
    ) -> tuple[RequestColumns, list[StepRecord]]:
        num_sequences = sum(shape.num_samples for _, shape in schedule)
        async with AsyncClient(self._services.target) as client, watch_steps(client) as watch:
            columns = await self._drive(schedule, seed, keep_gaps=False)
            await watch.wait_left(num_sequences, _TIMEOUT_S)
        if watch.num_dropped or watch.num_left != num_sequences:
            raise BenchmarkError(
                f"{watch.num_dropped} step records were lost, {watch.num_left} of {num_sequences} sequences have left"
            )
        return columns, sorted(watch.records, key=lambda record: record.step_id)

    async def _drive(self, schedule: list[tuple[float, RequestShape]], seed: int, keep_gaps: bool) -> RequestColumns:
        target = SessionTarget(self._services.target, seed=seed)
        try:
            facts = await target.start()
            prompts = Prompts(seed, facts.vocab_size)
            columns = await drive(schedule, target, prompts, timeout_s=_TIMEOUT_S, keep_gaps=keep_gaps)
        finally:
            await target.close()
        if not columns.ok.all() or len(columns) != len(schedule):
            codes = sorted(set(columns.error[~columns.ok].tolist()))
            raise BenchmarkError(f"{len(columns)} of {len(schedule)} requests came back, some with {codes}")
        return columns


def _schedule(shapes: Sequence[RequestShape], times: Sequence[float] | None) -> list[tuple[float, RequestShape]]:
    due = [0.0] * len(shapes) if times is None else times
    return list(zip(due, shapes, strict=True))
