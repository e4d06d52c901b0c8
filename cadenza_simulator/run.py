"""The event loop in virtual time: requests arrive, steps are planned, results are applied; nothing sleeps.

The core is the services' own, and each lane is driven as `engine.plan_loop` does it: plan k+1 is made before result k
arrives, as late as the pacer allows. The service's behaviour around the core is modelled too: a full queue refuses with
RESOURCE_EXHAUSTED, a prompt that is too long is refused with INVALID_ARGUMENT, and beams give no output before they
end.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cadenza_common.plan.sampling import SequenceSampling
from cadenza_loadtest.driving.driver import present_objects_left_out
from cadenza_loadtest.measures.columns import RequestColumns, StepColumns
from cadenza_loadtest.requests import LoadTestError, RequestShape, Truncations
from cadenza_simulator.executor_profiles import ExecutorProfile
from cadenza_simulator.lanes import TOKEN, SimulatedLane
from cadenza_simulator.placement import PlacementName, placement_policy
from cadenza_simulator.request_log import RequestLog, Watch
from cadenza_simulator.rows import StepRows
from cadenza_simulator.traffic import DueRequest, Traffic
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.errors import LimitsError, RequestRejectedError
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import BeamSpec, RequestSpec
from scheduler_svc.engine.policies_from_options import policies_from_options
from scheduler_svc.tenants.errors import TenantsFileError
from scheduler_svc.tenants.file import read_tenants

_GREEDY = SequenceSampling()
MAX_STEP_ROWS = 65_536
"""Most step rows that are kept; longer runs keep every second step, or every fourth, …"""


class TokenPrompts(Protocol):
    """`cadenza_loadtest.workloads.prompts.Prompts`."""

    def token_ids(self, shape: RequestShape, history: Sequence[int] = ()) -> list[int]:
        """The tokens of a prompt, after the `history` of the session's earlier turns."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The result of a run."""

    requests: RequestColumns
    steps: StepColumns | None
    step_stride: int
    """Steps per row of `steps`."""
    duration_s: float
    """Virtual time from the start to the last event."""
    num_steps: int
    num_preemptions: int
    ended_early: bool
    """Whether the watch ended the run."""
    truncations: Truncations | None = None
    """Requests whose lengths were truncated; None: not recorded."""


class Simulation:
    """One run. Times are in seconds of virtual time, from its start."""

    def __init__(
        self,
        fleet: Sequence[ExecutorProfile],
        config: SchedulerConfig,
        traffic: Traffic,
        *,
        prompts: TokenPrompts | None = None,
        keep_gaps: bool = False,
        keep_steps: bool = True,
        watch: Watch | None = None,
        placement: PlacementName | None = None,
        seed: int = 0,
    ) -> None:
        """`prompts` makes token ids, so that the prefix cache finds shared prefixes; None: no prompts share a prefix,
        and the cache is off. `placement`: None for the service's policy. `seed` seeds the noise and the order
        of equal executors. Raises LoadTestError for options that do not fit the executors or each other.
        """
        if not fleet:
            raise LoadTestError("--executors: at least one is needed")
        policies = policies_from_options(config)
        if prompts is None:
            policies = replace(policies, prefix_caching=False)
        if placement is not None:
            policies = replace(policies, placement=placement_policy(placement, seed))
        self._core = _Core(policies)
        for index, profile in enumerate(fleet):
            try:
                self._core.add_executor(index, profile.spec(config))
            except LimitsError as error:
                raise LoadTestError(f"executor {profile.name}: {error}") from None
        cores = self._core.lanes
        self._lanes = [
            SimulatedLane(index, profile, cores[index], config.max_inflight_plans, seed)
            for index, profile in enumerate(fleet)
        ]
        overheads = fleet[0].overheads
        self._request_s = overheads.request_us / 1e6
        self._request_log = RequestLog(traffic, self._lanes, overheads.reply_us / 1e6, keep_gaps=keep_gaps, watch=watch)
        self._keeps_gaps = keep_gaps
        self._max_queued = config.max_queued_requests
        self._has_tenants = config.tenants is not None
        if config.tenants is not None:
            self._core.set_weights(_weights(config.tenants))
        self._traffic = traffic
        self._prompts = prompts
        self._filler = (TOKEN,) * max(lane.core.spec.max_model_len for lane in self._lanes)
        self._steps = StepRows(MAX_STEP_ROWS) if keep_steps else None
        self._has_others = len(self._lanes) > 1
        self._has_beams = False
        self._all_alone = True
        """Whether every request so far has one sample."""
        self._free_at = 0.0
        """When the scheduler, which makes one plan at a time, has finished the current one."""
        self._now = 0.0

    def run(self) -> RunOutcome:
        """Run until all requests have ended. Call it once only."""
        with _calm_collector():
            self._run()
        steps = self._steps
        return RunOutcome(
            requests=self._request_log.columns(),
            steps=None if steps is None else steps.columns(),
            step_stride=1 if steps is None else steps.stride,
            duration_s=self._now,
            num_steps=self._core.num_steps,
            num_preemptions=self._core.num_preemptions,
            ended_early=self._request_log.stopped,
        )

    def _run(self) -> None:
        traffic, request_log, request_s = self._traffic, self._request_log, self._request_s
        turns = list(self._lanes)  # of lanes that want to plan at once, the one that planned least recently does
        alone = turns[0] if len(turns) == 1 else None
        while not request_log.stopped:
            lane = alone or min(turns, key=_next_at)
            inflight_steps, now = lane.inflight_steps, lane.plan_at
            applies = inflight_steps and inflight_steps[0].result_at <= now
            if applies:
                now = inflight_steps[0].result_at
            arrives = traffic.due + request_s
            if arrives <= now:
                if arrives == math.inf:
                    if not self._drain():
                        break
                    continue
                self._now = arrives
                self._arrive(arrives)
            elif applies:
                self._now = now
                self._apply(lane, now)
            elif now < self._free_at:
                lane.plan_at = self._free_at
            else:
                self._now = now
                self._plan(lane, now)
                if alone is None:
                    turns.remove(lane)
                    turns.append(lane)

    def _drain(self) -> bool:
        """No event is left: end the wait of an incomplete static batch. Returns False if no request is left."""
        core = self._core
        if not core.groups:
            return False
        if core.draining:
            raise LoadTestError(f"{len(core.groups)} requests wait forever: this is a bug of the simulator")
        core.drain(True)
        self._wake(self._now)
        return True

    def _wake(self, now: float) -> None:
        """Schedule another planning attempt of the idle lanes: they may take what waits."""
        for lane in self._lanes:
            if lane.idle:
                lane.pace(now)

    def _has_place(self, tenant: str) -> bool:
        """Whether the queue takes a request of this tenant; as scheduler_svc.tenants.quotas."""
        num_free = self._max_queued - len(self._core.waiting)
        if not self._has_tenants:
            return num_free > 0
        return sum(group.spec.tenant == tenant for group in self._core.waiting) < num_free

    def _arrive(self, now: float) -> None:
        """A request arrives: it is queued or refused."""
        request, core = self._traffic.take(), self._core
        shape = request.shape
        if not self._has_place(shape.tenant):
            self._request_log.refuse(request, now, "RESOURCE_EXHAUSTED")
            return
        spec = RequestSpec(
            str(shape.index),
            self._prompt(request),
            _GREEDY,
            shape.num_output_tokens,
            num_samples=1 if shape.beam_width else shape.n,
            beams=BeamSpec(shape.beam_width) if shape.beam_width else None,
            tenant=shape.tenant,
        )
        try:
            core.add_request(spec, now)
        except RequestRejectedError:
            self._request_log.refuse(request, now, "INVALID_ARGUMENT")
            return
        self._has_beams = self._has_beams or bool(shape.beam_width)
        self._all_alone = self._all_alone and spec.num_sequences == 1
        self._request_log.accept(spec.key, request, now, spec.prompt_token_ids)
        self._wake(now)

    def _prompt(self, request: DueRequest) -> tuple[int, ...]:
        if self._prompts is not None:
            return tuple(self._prompts.token_ids(request.shape, request.history))
        length = len(request.history) + request.shape.num_prompt_tokens
        return self._filler[:length] if length <= len(self._filler) else (TOKEN,) * length

    def _plan(self, lane: SimulatedLane, now: float) -> None:
        """The plan loop's turn: make and send a plan, if there is anything to plan."""
        core = self._core
        self._free_at = now + lane.plan_s
        places = self._has_others and core.places
        plan = core.plan_step(lane.index, now)
        if core.has_outputs:
            self._request_log.record_outputs(core.take_outputs(), now)
        lane.idle = plan is None
        if places or (self._has_others and core.places):
            self._wake(now)  # requests were placed, perhaps on idle lanes, or are to be placed by the next plan
        elif plan is None:
            wakes = core.wakes_at(lane.index, now)
            lane.plan_at = wakes if wakes is not None and wakes > now else math.inf
        if plan is None:
            return
        step = lane.core.inflight[-1]
        if step.joined:
            self._request_log.planned(step, now)
        inflight_step = lane.launch(step, now, beams=self._has_beams)
        if self._steps is not None and self._steps.is_due(len(step.preempted)):
            inflight_step.row = self._load(lane, step)
        lane.pace(now)

    def _apply(self, lane: SimulatedLane, now: float) -> None:
        """A result has arrived."""
        core, inflight_step = self._core, lane.take_result(now)
        _, outputs = core.apply_result(lane.index, inflight_step.result, now)
        core.take_finished()
        if inflight_step.starting:
            self._request_log.started(lane, inflight_step, now)
        if self._keeps_gaps:
            lane.applied.append(now)
        if outputs.finishes or outputs.hypotheses:
            self._request_log.record_outputs(outputs, now)
        if inflight_step.row is not None and self._steps is not None:
            self._steps.put((*inflight_step.row[:2], now, *inflight_step.row[2:]))
        lane.pace(now)
        if self._has_others and core.waiting:
            self._wake(now)

    def _load(self, lane: SimulatedLane, step: PlannedStep) -> tuple[float, ...]:
        """Queues and memory when a step is planned: a row of StepColumns without its end and its preemptions."""
        core, core_lane, result = self._core, lane.core, lane.inflight_steps[-1].result
        num_running = len(core_lane.running) + len(core_lane.finishing)
        if not self._all_alone:
            num_running = len({sequence.group for sequence in (*core_lane.running, *core_lane.finishing)})
        num_blocks, num_swapped = core_lane.spec.num_blocks, core.num_swapped
        return (
            lane.index, step.planned_at, result.timings.device_ns / 1e9,
            len(step.decode_slots) + len(step.chunks), step.total_tokens, len(result.slots),
            len(core.waiting) - num_swapped, num_running, num_swapped,
            num_blocks - core_lane.blocks.num_free, num_blocks, lane.num_stored_tokens(alone=self._all_alone),
        )  # fmt: skip


class _Core(Scheduler):
    """The core with two cheap views of its state."""

    @property
    def has_outputs(self) -> bool:
        """Whether planning has ended a request."""
        return bool(self._requests.outputs.finishes)

    @property
    def places(self) -> bool:
        """Whether the next plan places requests on lanes."""
        return self._requests.placer.num_unplaced > 0

    @property
    def draining(self) -> bool:
        """Whether the core drains: no further request will arrive."""
        return self._requests.draining


def _weights(path: str) -> dict[str, float]:
    """The weights in a tenants file; raises LoadTestError."""
    try:
        return read_tenants(path).weights
    except TenantsFileError as error:
        raise LoadTestError(f"--tenants: {error}") from None


def _next_at(lane: SimulatedLane) -> float:
    return lane.next_at


@contextlib.contextmanager
def _calm_collector() -> Iterator[None]:
    """Run the garbage collector rarely, and never on objects that existed before.

    The objects of a request refer to each other, so collection is needed; nothing else here makes reference cycles.
    """
    thresholds, enabled = gc.get_threshold(), gc.isenabled()
    with present_objects_left_out():
        gc.enable()
        gc.set_threshold(20_000, 20, 100)
        try:
            yield
        finally:
            gc.set_threshold(*thresholds)
            if not enabled:
                gc.disable()
