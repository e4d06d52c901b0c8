"""The loop of a fleet: in each time slice requests arrive and are routed and placed, and all executors advance.

Routers and schedulers know the state at the beginning of the slice and what they have sent in it; a request reaches its
executor at its own time, not at the end of the slice. KV from prefill to decode executors (`Split`) goes on its way at
the next slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from benchmarks.fleet.arrivals import Arrivals, joined
from benchmarks.fleet.bank import ExecutorBank, Progress
from benchmarks.fleet.caches import ExecutorModel, PrefixCaches
from benchmarks.fleet.placement import Placement
from benchmarks.fleet.requests import Failures, RequestTable
from benchmarks.fleet.results import FleetResult, Objective, Tally
from benchmarks.fleet.routers import Load, RouterName, make_router
from cadenza_loadtest.requests import Floats, Ints, LoadTestError

FRONT_US = 5.7
"""CPU time of a scheduler for each token to clients: one Session, token ids (rows of `service_plane`)."""
LOST_S = 0.5
"""Until the requests of a lost executor go to others (docs/executors.md)."""
_LONGEST_DRAIN_S = 3600.0


class Source(Protocol):
    """The requests, in the order of time."""

    num_sessions: int
    """Session numbers are below this."""
    num_groups: int
    max_output: int
    """No output is longer."""

    def take(self, begin_s: float, end_s: float) -> Arrivals:
        """The requests that are due from `begin_s` up to, not including, `end_s`; the next call begins there."""


@dataclass(frozen=True, slots=True)
class Split:
    """Executors that compute prompts only, and the link over which their KV goes to the others."""

    num_prefill: int
    kv_bytes: float
    """Of a token."""
    bytes_per_s: float
    """Of each prefill executor's link."""
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What is simulated."""

    model: ExecutorModel
    num_schedulers: int
    num_executors: int
    """Of each scheduler."""
    router: RouterName = "round-robin"
    duration_s: float = 86400.0
    slice_s: float = 0.25
    objectives: tuple[Objective, ...] = (Objective(),)
    failures_per_hour: float = 0.0
    """Of an executor."""
    repair_s: float = 600.0
    ideal: bool = False
    """Whether scheduling takes no time: one queue for all executors, which no process could serve."""
    split: Split | None = None
    price: float = 0.0
    seed: int = 0


class Fleet:
    """One run."""

    def __init__(self, plan: FleetPlan, source: Source) -> None:
        """Raises LoadTestError for numbers of executors that do not fit each other."""
        if plan.split is not None and not 0 < plan.split.num_prefill < plan.num_executors:
            raise LoadTestError(f"--prefill {plan.split.num_prefill}: must be from 1 to {plan.num_executors - 1}")
        if plan.split is not None and plan.num_schedulers > 1:
            raise LoadTestError(f"--schedulers {plan.num_schedulers}: --prefill goes with one scheduler")
        self._plan, self._source = plan, source
        total = plan.num_schedulers * plan.num_executors
        self._table = RequestTable()
        num_prefill = plan.split.num_prefill if plan.split is not None else 0
        self._bank = ExecutorBank(total, plan.model, self._table, source.max_output, num_prefill)
        self._caches = PrefixCaches(total, source.num_sessions, source.num_groups)
        self._placement = Placement(self._bank, self._table, self._caches, plan.num_schedulers)
        pool_tokens = plan.num_executors * plan.model.pool_tokens
        self._router = make_router(
            plan.router, plan.num_schedulers, source.num_sessions, source.num_groups, pool_tokens, plan.seed
        )
        self._failures = Failures(total, plan.failures_per_hour, plan.repair_s, plan.seed)
        self._tally = Tally(plan.objectives, max(1, math.ceil(plan.duration_s / 3600)))
        self._held_back: list[Arrivals] = []
        """Requests that came while no executor was up."""
        self._handed_on: list[tuple[Ints, Floats]] = []
        self._link_free_s = np.zeros(total)

    def run(self, on_slice: Callable[[float], None] | None = None) -> FleetResult:
        """Serve all requests of the time, to their ends or for an hour more. `on_slice` is called with the time."""
        plan, num_slices, tally = self._plan, 0, self._tally
        while True:
            now_s = num_slices * plan.slice_s
            if now_s >= plan.duration_s:
                waits = self._table.num_live or self._held_back
                if not waits or now_s >= plan.duration_s + _LONGEST_DRAIN_S:
                    break
            end_s = (num_slices + 1) * plan.slice_s
            self._fail(now_s, end_s)
            if now_s < plan.duration_s:
                self._arrive(self._source.take(now_s, min(end_s, plan.duration_s)), now_s)
            elif self._held_back:
                self._route(joined(self._take_held_back()), now_s)
            self._hand_over()
            if not plan.ideal:
                self._limit_schedulers()
            self._account(self._bank.advance(end_s))
            num_slices += 1
            if on_slice is not None:
                on_slice(end_s)
        tally.gaps.merge(self._bank.gaps)
        tally.num_preemptions, tally.busy_s = self._bank.num_preemptions, float(self._bank.busy_s.sum())
        return FleetResult(tally, len(self._bank), plan.duration_s, plan.price)

    def _arrive(self, arrivals: Arrivals, now_s: float) -> None:
        self._tally.arrived(arrivals.due_s)
        new = arrivals.session[arrivals.fresh]
        self._caches.forget_sessions(new)
        self._router.forget(new)
        holds = self._plan.model.holds(arrivals.prompt, arrivals.output)
        if not holds.all():
            self._tally.num_refused += int((~holds).sum())
            arrivals = arrivals.select(holds)
        if self._held_back:
            arrivals = joined([*self._take_held_back(), arrivals])
        self._route(arrivals, now_s)

    def _take_held_back(self) -> list[Arrivals]:
        held, self._held_back = self._held_back, []
        return held

    def _route(self, arrivals: Arrivals, now_s: float) -> None:
        if not len(arrivals):
            return
        load = self._load()
        if not load.up.any():
            self._held_back.append(arrivals)
            return
        one = self._plan.num_schedulers == 1
        schedulers = np.zeros(len(arrivals), np.int64) if one else self._router.choose(arrivals, load)
        table = self._table
        requests = table.add(arrivals.due_s, arrivals.prompt, arrivals.output)
        table.session[requests], table.group[requests] = arrivals.session, arrivals.group
        table.ready_s[requests] = np.maximum(arrivals.due_s + self._plan.model.request_s, now_s)
        self._placement.place(requests, schedulers, arrivals.shared, arrivals.group_tokens, now_s)
        self._tally.prompt_tokens += int(arrivals.prompt.sum())
        self._tally.cached_tokens += int(table.cached[requests].sum())

    def _load(self) -> Load:
        bank, shape = self._bank, (self._plan.num_schedulers, -1)
        waiting = bank.size.reshape(shape).sum(axis=1)
        used = bank.held.reshape(shape).sum(axis=1) / (self._plan.num_executors * self._plan.model.pool_tokens)
        unfinished = waiting + bank.batch.reshape(shape).sum(axis=1)
        return Load(unfinished, waiting, used, self._placement.num_taking > 0)

    def _fail(self, now_s: float, end_s: float) -> None:
        for _, executor, fails in self._failures.take(end_s):
            if not fails:
                self._bank.restore(executor, now_s)
                continue
            self._tally.num_failures += 1
            self._caches.forget_place(executor)
            requests = self._bank.fail(executor)
            if not len(requests):
                continue
            self._tally.num_restarted += len(requests)
            self._table.ready_s[requests] = now_s + LOST_S
            scheduler = executor // self._plan.num_executors
            if not self._placement.num_taking[scheduler]:
                scheduler = int(self._placement.num_taking.argmax())
            nothing = np.zeros(len(requests), np.int64)
            self._placement.place(requests, np.full(len(requests), scheduler), nothing, nothing, now_s)

    def _limit_schedulers(self) -> None:
        """A scheduler makes one plan at a time and writes all output: the steps of its executors take no less."""
        bank, shape = self._bank, (self._plan.num_schedulers, -1)
        busy = ((bank.batch > 0) | (bank.size > 0)).reshape(shape).sum(axis=1)
        tokens = bank.batch.reshape(shape).sum(axis=1)
        least_s = busy * self._plan.model.plan_s + tokens * (FRONT_US / 1e6)
        bank.least_step_s[:] = np.repeat(least_s, self._plan.num_executors)

    def _hand_over(self) -> None:
        """KV that was computed in the last slice goes to decode executors, one after the other over each link."""
        if not self._handed_on:
            return
        split, table = self._plan.split, self._table
        assert split is not None, "only prefill executors hand on"
        requests = np.concatenate([each for each, _ in self._handed_on])
        at_s = np.concatenate([each for _, each in self._handed_on])
        self._handed_on = []
        order = np.argsort(at_s, kind="stable")
        requests, at_s = requests[order], at_s[order]
        takes_s = table.context[requests] * split.kv_bytes / split.bytes_per_s
        for request, begin_s, time_s in zip(requests.tolist(), at_s.tolist(), takes_s.tolist(), strict=True):
            executor = int(table.executor[request])
            done_s = max(begin_s, float(self._link_free_s[executor])) + time_s
            self._link_free_s[executor] = done_s
            table.ready_s[request] = done_s + split.latency_s
        requests = requests[np.argsort(table.ready_s[requests], kind="stable")]
        table.cached[requests] = table.context[requests]
        self._placement.place_decodes(requests, table.executor[requests])

    def _account(self, progress: Progress) -> None:
        table, tally, reply_s = self._table, self._tally, self._plan.model.reply_s
        for requests, at_s in progress.prefilled:
            self._touch(requests, table.context[requests], table.context[requests] - table.cached[requests])
            later = table.first_s[requests] < at_s
            tally.gaps.add((at_s - table.first_s[requests])[later & ~table.again[requests]])
        self._handed_on += [each for each in progress.handed_on if len(each[0])]
        if not progress.ended:
            return
        requests = np.concatenate([each for each, _ in progress.ended])
        at_s = np.concatenate([each for _, each in progress.ended])
        self._touch(requests, table.context[requests] + table.left[requests], table.left[requests])
        output = table.output[requests]
        tally.ended(table.due_s[requests], table.first_s[requests] + reply_s, at_s + reply_s, output)
        if len(requests):
            self._placement.mean_left += min(1.0, len(requests) / 1000) * (
                float(output.mean()) - self._placement.mean_left
            )
        table.release(requests)

    def _touch(self, requests: Ints, tokens: Ints, new_tokens: Ints) -> None:
        table = self._table
        if self._source.num_sessions or self._source.num_groups:
            sessions, groups = table.session[requests], table.group[requests]
            self._caches.touch(sessions, groups, table.executor[requests], tokens, new_tokens)
