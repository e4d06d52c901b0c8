"""Runs a load test from its settings to its file: the warm-up, every point, every repetition."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from cadenza.errors import CadenzaError, PermissionDeniedError
from cadenza_loadtest.caveats import full_batch, load_caveats, server_caveats
from cadenza_loadtest.driving.driver import Progress, drive, undo_cancellation
from cadenza_loadtest.driving.target import ServerFacts, Target
from cadenza_loadtest.driving.watch import StepSeries, watch_series
from cadenza_loadtest.failures import Failures, failure_sentences
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.rate_search import RateSearch
from cadenza_loadtest.rate_trial import FIRST_RATE, Judgement, at_rate, judge, limits_of
from cadenza_loadtest.requests import Truncations
from cadenza_loadtest.results.results import CTRL_C, LoadTestFile, MaxRate, Point, Reached, Run, point_of, run_of
from cadenza_loadtest.schedule import (
    DEFAULT_REQUESTS,
    ScheduledRequest,
    check_schedule,
    make_schedule,
    planned_points,
    truncated_to,
    window_of,
)
from cadenza_loadtest.settings import LoadSettings
from cadenza_loadtest.targets import make_target
from cadenza_loadtest.workloads.prompts import Prompts

_RUN_SEEDS = 2**32
"""Distance between the prompt seeds of successive runs: the points of a sweep have the same lengths and arrivals, but
must not find each other's prompts in a prefix cache."""
_AT_ONCE = {
    "request_rate": float("inf"),
    "arrivals": "poisson",
    "burstiness": 1.0,
    "concurrency": None,
    "duration_s": None,
}
_TOLERANCE = 0.05
TRIAL_S = 60.0
"""Seconds of arrivals in a search trial if the settings give neither a number of requests nor a duration."""


class CampaignView(Protocol):
    """Shows the progress of a load test."""

    def running(self, what: str, total: int | None) -> AbstractContextManager[None]:
        """A run of `total` requests is in progress while the context is open; None: the number is not known."""

    def on_progress(self, now: Progress) -> None:
        """Show the run's progress."""

    def say(self, text: str) -> None:
        """Show a sentence."""


async def run_campaign(
    settings: LoadSettings,
    address: str,
    view: CampaignView,
    *,
    label: str = "",
    command: Sequence[str] = (),
    reached: Reached | None = None,
) -> LoadTestFile:
    """Run everything that the settings request on the server at `address`, HOST:PORT or a URL.

    A load test that is cut short, by Ctrl-C (the task is cancelled) or by an error, keeps the runs that were measured,
    and the file states it. Raises LoadTestError for invalid settings, before anything is sent, and CadenzaError if the
    server does not report what it serves or nothing was measured. Failed requests are part of the result.
    """
    planned = planned_points(settings)
    target = make_target(settings, address)
    server = await target.start()
    for sentence in (*load_caveats(settings), *server_caveats(settings, server)):
        view.say(f"! {sentence}")
    runner = CampaignRuns(target, server, address, view)
    search = _search_of(settings) if settings.find_max_rate else None
    try:
        with runner.keeping():
            await (_each(runner, planned) if search is None else _search(runner, settings, search))
    finally:
        await target.close()
    return LoadTestFile(
        label=label or server.model,
        command=list(command),
        settings=settings.model_dump(mode="json"),
        reached=reached,
        server=server.to_json(),
        points=runner.points if search is None else sorted(runner.points, key=_rate),
        max_rate=None if search is None else _max_rate(search, settings),
        cut_short=runner.cut_short,
    )


@dataclass(slots=True)
class CampaignRuns:
    """The runs against one server."""

    target: Target
    server: ServerFacts
    address: str
    view: CampaignView
    warm: bool = False
    num_runs: int = 0
    points: list[Point] = field(default_factory=list)
    """The measured points; the last one may be incomplete."""
    cut_short: str = ""
    """Why the load test was cut short; nothing more is started then."""

    async def point(self, settings: LoadSettings, swept: Mapping[str, float | str]) -> None:
        """Run all repetitions with these settings, or those that were started before the load test was cut short."""
        settings = truncated_to(settings, self.server.max_model_len)
        await self._warm_up(settings)
        runs: list[Run] = []
        try:
            for index in range(settings.repetitions):
                if self.cut_short:
                    return
                repetition = f"run {index + 1}/{settings.repetitions}" if settings.repetitions > 1 else ""
                what = " ".join(filter(None, (_name(swept), repetition))) or "requests"
                runs.append(await self._run(settings, settings.seed + index, what))
        finally:
            if runs:
                self.points.append(point_of(runs, swept))

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Ctrl-C and errors end only the body if something was measured before."""
        try:
            yield
        except asyncio.CancelledError:
            if not self.points:
                raise
            undo_cancellation()
            self._interrupt()
        except CadenzaError as error:
            if not self.points:
                raise
            self.cut_short = str(error)

    async def _run(self, settings: LoadSettings, seed: int, what: str) -> Run:
        """One run: make the whole schedule, then send it."""
        truncations = Truncations()
        schedule: Iterable[ScheduledRequest] = truncations.recording(make_schedule(settings, seed))
        total = None
        if settings.concurrency is None:  # a closed loop's schedule may be endless
            schedule = list(schedule)
            total = len(schedule)
            check_schedule(settings, schedule)
        started_unix_s = time.time()
        failures = Failures()
        with self.view.running(what, total):
            async with self._watching(settings) as steps:
                columns = await self._drive(
                    schedule, settings, seed, failures, steps.begin if steps else None, on_cancelled=self._interrupt
                )
        if steps and steps.error:
            self.view.say(f"! the step watch broke with {steps.error}: later steps are missing")
        return run_of(
            columns,
            steps.columns() if steps else None,
            seed=seed,
            started_unix_s=started_unix_s,
            window=None if self.cut_short else window_of(settings, columns),
            slo=settings.limits,
            truncations=truncations,
            messages=failures.messages,
            open_loop=settings.concurrency is None,
        )

    async def _drive(
        self,
        schedule: Iterable[ScheduledRequest],
        settings: LoadSettings,
        seed: int,
        failures: Failures,
        on_start: Callable[[float], None] | None = None,
        on_cancelled: Callable[[], None] | None = None,
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
            on_cancelled=on_cancelled,
        )

    def _interrupt(self) -> None:
        self.cut_short = CTRL_C

    @contextlib.asynccontextmanager
    async def _watching(self, settings: LoadSettings) -> AsyncIterator[StepSeries | None]:
        """The steps of a Cadenza server while the body runs; None for other servers, or if steps are not recorded."""
        if settings.api == "openai" or not settings.watch_steps:
            yield None
            return
        async with contextlib.AsyncExitStack() as stack:
            try:
                series = await stack.enter_async_context(watch_series(self.address))
            except PermissionDeniedError as error:
                self.view.say(f"! no steps are recorded: {error}")
                yield None
                return
            yield series

    async def _warm_up(self, settings: LoadSettings) -> None:
        """Send uncounted requests: a server's first ones are slow because of kernels, caches and connections.

        Cancellation propagates: nothing has been measured yet.
        """
        if self.warm or not settings.warm_up_requests:
            return
        self.warm = True
        batch = full_batch(self.server)
        count = math.ceil(settings.warm_up_requests / batch) * batch
        # A file may hold fewer requests.
        few = settings.model_copy(update={**_AT_ONCE, "num_requests": None if settings.from_file else count})
        schedule = make_schedule(few, few.seed)
        requests = list(itertools.islice(schedule, count) if settings.from_file else schedule)
        failures = Failures()
        with self.view.running("warm-up", len(requests)):
            columns = await self._drive(requests, few, few.seed, failures)
        for sentence in failure_sentences(failures.errors, failures.messages, len(columns)):
            self.view.say(f"! warm-up: {sentence}")


async def _each(runner: CampaignRuns, planned: Sequence[tuple[LoadSettings, Mapping[str, str]]]) -> None:
    for point, swept in planned:
        if not runner.cut_short:
            await runner.point(point, swept)


def _search_of(settings: LoadSettings) -> RateSearch:
    return RateSearch(FIRST_RATE if settings.request_rate == float("inf") else settings.request_rate, _TOLERANCE)


async def _search(runner: CampaignRuns, settings: LoadSettings, search: RateSearch) -> None:
    """Search for the highest rate that holds, as `judge` decides."""
    while not runner.cut_short and (rate := search.next_rate()) is not None:
        trial = at_rate(settings, rate, seconds=TRIAL_S, num_requests=DEFAULT_REQUESTS)
        await runner.point(trial, {"request_rate": rate})
        if not runner.cut_short:
            runs = runner.points[-1].runs
            if not any(run.metrics.num_ok for run in runs):
                search.record(rate, False)
                raise CadenzaError(f"no request completed at {rate:.3g} requests/s, so no other rate is tried")
            found = judge([run.requests for run in runs], trial)
            search.record(rate, found.held)
            runner.view.say(f"{rate:.3g} requests/s: {_judgement_text(found, settings)}")


def _max_rate(search: RateSearch, settings: LoadSettings) -> MaxRate:
    return MaxRate(
        held=search.held,
        failed=search.failed,
        slo=limits_of(settings),
        slo_share=settings.slo_share,
        tolerance=_TOLERANCE,
    )


def _rate(point: Point) -> float:
    return float(point.swept["request_rate"])


def _judgement_text(found: Judgement, settings: LoadSettings) -> str:
    share = f"{found.share:.1%} within {settings.limits}, {settings.slo_share:.0%} required"
    return share if found.kept_up else f"{share}; the server did not keep up"


def _name(swept: Mapping[str, float | str]) -> str:
    """The point's settings as on the command line."""
    shown = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in swept.items()}
    return " ".join(f"{name.replace('_', '-')}={value}" for name, value in shown.items())
