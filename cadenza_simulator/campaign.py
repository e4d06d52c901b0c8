"""Runs a simulation from its settings to its file: every number of executors, every point, every repetition."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cadenza_loadtest.caveats import load_caveats
from cadenza_loadtest.requests import LoadTestError, Truncations
from cadenza_loadtest.results.results import CTRL_C, LoadTestFile, MaxRate, Point, Run, point_of, run_of
from cadenza_loadtest.schedule import make_schedule, planned_points, truncated_to, window_of
from cadenza_loadtest.settings import LoadSettings
from cadenza_loadtest.workloads.prompts import Prompts
from cadenza_simulator.capacity.capacity import Capacity
from cadenza_simulator.capacity.rate_trials import RunAt, TimeBudget
from cadenza_simulator.capacity.search import TOLERANCE, CapacitySearch, SearchProgress
from cadenza_simulator.executor_profiles import ExecutorProfile
from cadenza_simulator.placement import PlacementName
from cadenza_simulator.request_log import Watch
from cadenza_simulator.run import RunOutcome, Simulation
from cadenza_simulator.traffic import Traffic
from scheduler_svc.config import SchedulerConfig

SHARING = ("shared-prefix", "multi-turn")
"""Workloads whose prompts share prefixes; in the others no block is shared and the prefix cache has no hits."""
MAX_KEPT_GAPS = 100_000
"""Most requests of a run whose inter-token latencies are kept by default."""
_NOT_SIMULATED = ("timeout_s", "url", "adapters")
_PROMPT_VOCABULARY = 32_768


@dataclass(frozen=True, slots=True)
class Simulated:
    """The simulated system: the fleet, repeated `counts` times, under a scheduler with this config."""

    fleet: tuple[ExecutorProfile, ...]
    config: SchedulerConfig
    counts: tuple[int, ...] = (1,)
    placement: PlacementName | None = None
    """None: the service's."""

    def times(self, count: int) -> tuple[ExecutorProfile, ...]:
        """All executors, repeated `count` times."""
        return self.fleet * count

    def facts(self) -> dict[str, Any]:
        """Facts for the result file, in place of a server's own."""
        options = self.config.model_dump(mode="json", exclude={"executor", "listen", "config"}, exclude_defaults=True)
        facts = {
            "kind": "simulation",
            "model": ", ".join(dict.fromkeys(profile.name for profile in self.fleet)),
            "executors": [profile.model_dump(mode="json") for profile in self.fleet],
            "times": list(self.counts),
            "options": {name: str(value) for name, value in options.items()},
        }
        return facts if self.placement is None else facts | {"placement": self.placement}


def simulate(
    settings: LoadSettings,
    fleet: Sequence[ExecutorProfile],
    config: SchedulerConfig,
    seed: int,
    *,
    watch: Watch | None = None,
    placement: PlacementName | None = None,
    keep_steps: bool = True,
) -> RunOutcome:
    """Run these settings with this seed; raises LoadTestError for settings that cannot be simulated."""
    for name in _NOT_SIMULATED:
        if getattr(settings, name):
            raise LoadTestError(f"--{name.replace('_', '-')}: cannot be simulated")
    settings = truncated_to(settings, max(profile.spec(config).max_model_len for profile in fleet))
    truncations = Truncations()
    schedule = truncations.recording(make_schedule(settings, seed))
    traffic = Traffic(schedule, concurrency=settings.concurrency, duration_s=settings.duration_s)
    prompts = Prompts(seed, _PROMPT_VOCABULARY) if config.enable_prefix_caching and may_share(settings) else None
    outcome = Simulation(
        fleet,
        config,
        traffic,
        prompts=prompts,
        keep_gaps=keeps_gaps(settings),
        keep_steps=keep_steps,
        watch=watch,
        placement=placement,
        seed=seed,
    ).run()
    return replace(outcome, truncations=truncations)


def may_share(settings: LoadSettings) -> bool:
    """Whether prompts may share prefixes; synthetic prompts of independent tokens do not, so they need not be made."""
    return settings.from_file or settings.workload in SHARING


def keeps_gaps(settings: LoadSettings) -> bool:
    """Whether inter-token latencies are kept: if requested, or if there are few enough requests."""
    many = settings.num_requests
    if many is None and settings.duration_s is not None and settings.request_rate != math.inf:
        many = math.ceil(settings.duration_s * settings.request_rate)
    few = (many or 0) <= MAX_KEPT_GAPS
    return settings.keep_itl and (few or "keep_itl" in settings.model_fields_set)


def run_simulation(
    settings: LoadSettings,
    simulated: Simulated,
    view: SearchProgress,
    *,
    label: str = "",
    command: Sequence[str] = (),
    budget: TimeBudget | None = None,
) -> tuple[LoadTestFile, list[Capacity]]:
    """Run everything that the settings request for each number of executors; capacities are found for `find_max_rate`
    only, within the `budget`.

    Ctrl-C keeps the points that were simulated and what a search found, if there is anything, and the file states it.
    Raises LoadTestError.
    """
    planned = planned_points(settings)
    for sentence in load_caveats(settings):
        view.say(sentence)
    points: list[Point] = []
    search = _search_of(settings, simulated, view, budget) if settings.find_max_rate else None
    cut_short = ""
    try:
        if search is not None:
            search.run()
        else:
            for count in simulated.counts:
                fleet = simulated.times(count)
                for point, swept in planned:
                    outcomes = _runs(point, fleet, simulated, view)
                    points.append(_point(point, outcomes, {**_named(simulated, len(fleet)), **swept}))
    except KeyboardInterrupt:
        if not points and not (search is not None and any(each.trials for each in search.capacities)):
            raise
        cut_short = CTRL_C
    capacities = [] if search is None else search.capacities
    for capacity in capacities:
        named = _named(simulated, capacity.num_executors)
        points += [
            _point(trial.settings, trial.outcomes, {**named, "request_rate": trial.rate}) for trial in capacity.kept
        ]
    facts = simulated.facts()
    file = LoadTestFile(
        source="simulate",
        label=label or str(facts["model"]),
        command=list(command),
        settings=settings.model_dump(mode="json"),
        server=facts,
        points=points,
        max_rate=_max_rate(settings, capacities[0]) if len(capacities) == 1 else None,
        cut_short=cut_short,
    )
    return file, capacities


def _named(simulated: Simulated, num_executors: int) -> dict[str, float | str]:
    """The number of executors as a swept value, if there are several."""
    return {"executors": float(num_executors)} if len(simulated.counts) > 1 else {}


def _runs(
    settings: LoadSettings, fleet: Sequence[ExecutorProfile], simulated: Simulated, view: SearchProgress
) -> list[tuple[int, RunOutcome]]:
    """Run all repetitions; returns each with its seed."""
    runs = []
    for index in range(settings.repetitions):
        seed, began = settings.seed + index, time.perf_counter()
        outcome = simulate(
            settings, fleet, simulated.config, seed, placement=simulated.placement, keep_steps=settings.watch_steps
        )
        wall_s = time.perf_counter() - began
        view.say(
            f"{len(outcome.requests)} requests, {outcome.duration_s:.0f} s of virtual time in {wall_s:.1f} s: "
            f"{outcome.duration_s / wall_s:.0f} times as fast as real time"
        )
        runs.append((seed, outcome))
    return runs


def _search_of(
    settings: LoadSettings, simulated: Simulated, view: SearchProgress, budget: TimeBudget | None
) -> CapacitySearch:
    # The gaps of all trials together would fill the memory.
    settings = settings.model_copy(
        update={"keep_itl": settings.limits is not None and settings.limits.itl_s is not None}
    )

    def run_of_fleet(fleet: Sequence[ExecutorProfile]) -> RunAt:
        def run(at_rate: LoadSettings, seed: int, watch: Watch | None) -> RunOutcome:
            return simulate(
                at_rate,
                fleet,
                simulated.config,
                seed,
                watch=watch,
                placement=simulated.placement,
                keep_steps=settings.watch_steps,
            )

        return run

    fleets = [simulated.times(count) for count in simulated.counts]
    return CapacitySearch(settings, {len(fleet): run_of_fleet(fleet) for fleet in fleets}, view, budget=budget)


def _max_rate(settings: LoadSettings, capacity: Capacity) -> MaxRate:
    limits = settings.limits
    assert limits is not None, "checked by the settings"
    return MaxRate(
        held=capacity.held,
        failed=capacity.failed,
        slo=limits,
        slo_share=settings.slo_share,
        tolerance=TOLERANCE,
        complete=capacity.complete,
    )


def _point(
    settings: LoadSettings, outcomes: Sequence[tuple[int, RunOutcome]], swept: Mapping[str, float | str]
) -> Point:
    return point_of([_run(settings, seed, outcome) for seed, outcome in outcomes], swept)


def _run(settings: LoadSettings, seed: int, outcome: RunOutcome) -> Run:
    return run_of(
        outcome.requests,
        outcome.steps,
        seed=seed,
        started_unix_s=time.time(),
        window=window_of(settings, outcome.requests),
        slo=settings.limits,
        duration_s=outcome.duration_s,
        truncations=outcome.truncations,
        open_loop=settings.concurrency is None,
    )
