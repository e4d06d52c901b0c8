"""A load test from its settings to its file: every point, every repetition, the warm-up before them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from cadenza.loadtest.columns import RequestColumns
from cadenza.loadtest.cuts import Cuts
from cadenza.loadtest.driver import Progress, drive
from cadenza.loadtest.failures import Failures, told
from cadenza.loadtest.prompts import Prompts
from cadenza.loadtest.rate_search import RateSearch
from cadenza.loadtest.rate_trial import FIRST_RATE, Judgement, at_rate, judge, limits_of
from cadenza.loadtest.results import LoadTestFile, MaxRate, Point, Reached, Run, point_of, run_of
from cadenza.loadtest.schedule import (
    DEFAULT_REQUESTS,
    ScheduledRequest,
    check_schedule,
    cut_to,
    make_schedule,
    planned_points,
    window_of,
)
from cadenza.loadtest.settings import LoadSettings
from cadenza.loadtest.target import ServerFacts, Target
from cadenza.loadtest.targets import make_target
from cadenza.loadtest.watch import StepSeries, watch_series

_RUN_SEEDS = 2**32
"""Between the seeds of prompts from run to run: the points of a sweep have the same lengths and arrivals, and must not
find each other's prompts in a prefix cache."""
_AT_ONCE = {
    "request_rate": float("inf"),
    "arrivals": "poisson",
    "burstiness": 1.0,
    "concurrency": None,
    "duration_s": None,
}
_TOLERANCE = 0.05
TRIAL_S = 60.0
"""Seconds of arrivals in a trial of the search, if the settings name neither requests nor a duration."""


class View(Protocol):
    """Who is told how a load test gets on."""

    def running(self, what: str, total: int | None) -> AbstractContextManager[None]:
        """A run of so many requests is on."""

    def on_progress(self, now: Progress) -> None:
        """Where it stands."""

    def say(self, text: str) -> None:
        """A sentence."""


async def run_campaign(
    settings: LoadSettings,
    address: str,
    view: View,
    *,
    label: str = "",
    command: Sequence[str] = (),
    reached: Reached | None = None,
) -> LoadTestFile:
    """Everything that the settings ask of the server at `address`, HOST:PORT or a URL.

    Raises LoadTestError for settings that cannot be, before anything is sent, and CadenzaError if the server cannot be
    asked what it serves; requests that fail are part of the result.
    """
    planned = planned_points(settings)
    target = make_target(settings, address)
    server = await target.start()
    try:
        runner = Runner(target, server, address, view)
        points: list[Point] = []
        max_rate = None
        if settings.find_max_rate:
            points, max_rate = await _search(runner, settings)
        else:
            for point, swept in planned:
                if not runner.interrupted:
                    points.append(await runner.point(point, swept))
    finally:
        await target.close()
    return LoadTestFile(
        label=label or server.model,
        command=list(command),
        settings=settings.model_dump(mode="json"),
        reached=reached,
        server=server.to_json(),
        points=points,
        max_rate=max_rate,
    )


@dataclass(slots=True)
class Runner:
    """Runs against one server."""

    target: Target
    server: ServerFacts
    address: str
    view: View
    warm: bool = False
    num_runs: int = 0
    interrupted: bool = False
    """By Ctrl-C: what has been measured is kept, and nothing more is begun."""

    async def point(self, settings: LoadSettings, swept: Mapping[str, float | str]) -> Point:
        """All repetitions with these settings."""
        settings = cut_to(settings, self.server.max_model_len)
        await self._warm_up(settings)
        runs: list[Run] = []
        for index in range(settings.repetitions):
            if not (runs and self.interrupted):
                repetition = f"run {index + 1}/{settings.repetitions}" if settings.repetitions > 1 else ""
                what = " ".join(filter(None, (_name(swept), repetition))) or "requests"
                runs.append(await self._run(settings, settings.seed + index, what))
        return point_of(runs, swept)

    async def _run(self, settings: LoadSettings, seed: int, what: str) -> Run:
        """One run: the schedule is made whole, then sent."""
        cuts = Cuts()
        schedule: Iterable[ScheduledRequest] = cuts.noting(make_schedule(settings, seed))
        total = None
        if settings.concurrency is None:  # those of a closed loop may have no end
            schedule = list(schedule)
            total = len(schedule)
            check_schedule(settings, schedule)
        started_unix_s = time.time()
        failures = Failures()
        with self.view.running(what, total):
            async with self._watching(settings) as steps:
                columns = await self._drive(schedule, settings, seed, failures, steps.begin if steps else None)
        return run_of(
            columns,
            steps.columns() if steps else None,
            seed=seed,
            started_unix_s=started_unix_s,
            window=None if self.interrupted else window_of(settings, columns),
            slo=settings.limits,
            cuts=cuts,
            messages=failures.messages,
        )

    async def _drive(
        self,
        schedule: Iterable[ScheduledRequest],
        settings: LoadSettings,
        seed: int,
        failures: Failures,
        on_start: Callable[[float], None] | None = None,
    ) -> RequestColumns:
        self.target.new_run()
        self.num_runs += 1
        return await drive(
            schedule,
            self.target,
            Prompts(seed + self.num_runs * _RUN_SEEDS, self.server.vocab_size),
            concurrency=settings.concurrency,
            timeout_s=settings.timeout_s,
            duration_s=settings.duration_s,
            text_prompts=settings.text_prompts or settings.endpoint == "chat",
            keep_gaps=settings.keep_itl,
            on_start=on_start,
            on_progress=self.view.on_progress,
            on_failed=failures.add,
            on_cancelled=self._interrupt,
        )

    def _interrupt(self) -> None:
        self.interrupted = True

    @contextlib.asynccontextmanager
    async def _watching(self, settings: LoadSettings) -> AsyncIterator[StepSeries | None]:
        """The steps of a Cadenza server while the body runs; None of others, or if they are not wanted."""
        if settings.api == "openai" or not settings.watch_steps:
            yield None
            return
        async with watch_series(self.address) as series:
            yield series

    async def _warm_up(self, settings: LoadSettings) -> None:
        """The first requests of a server are slow for reasons of their own: kernels, caches, connections."""
        if self.warm or not settings.warm_up_requests:
            return
        self.warm = True
        few = settings.model_copy(update={**_AT_ONCE, "num_requests": settings.warm_up_requests})
        failures = Failures()
        with self.view.running("warm-up", settings.warm_up_requests):
            columns = await self._drive(list(make_schedule(few, few.seed)), few, few.seed, failures)
        for sentence in told(failures.errors, failures.messages, len(columns)):
            self.view.say(f"! warm-up: {sentence}")


async def _search(runner: Runner, settings: LoadSettings) -> tuple[list[Point], MaxRate]:
    """The highest rate that holds, as `judge` says, and all the rates that were tried."""
    limits = limits_of(settings)
    search = RateSearch(FIRST_RATE if settings.request_rate == float("inf") else settings.request_rate, _TOLERANCE)
    points = []
    while not runner.interrupted and (rate := search.next_rate()) is not None:
        trial = at_rate(settings, rate, seconds=TRIAL_S, num_requests=DEFAULT_REQUESTS)
        point = await runner.point(trial, {"request_rate": rate})
        points.append(point)
        if not runner.interrupted:
            found = judge([run.requests for run in point.runs], trial)
            search.tell(rate, found.held)
            runner.view.say(f"{rate:.3g} requests/s: {_told(found, settings)}")
    points.sort(key=lambda point: float(point.swept["request_rate"]))
    return points, MaxRate(
        held=search.held, failed=search.failed, slo=limits, slo_share=settings.slo_share, tolerance=_TOLERANCE
    )


def _told(found: Judgement, settings: LoadSettings) -> str:
    share = f"{found.share:.1%} within {settings.limits}, {settings.slo_share:.0%} wanted"
    return share if found.kept_up else f"{share}; the server did not keep up"


def _name(swept: Mapping[str, float | str]) -> str:
    """As on the command line."""
    shown = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in swept.items()}
    return " ".join(f"{name.replace('_', '-')}={value}" for name, value in shown.items())
