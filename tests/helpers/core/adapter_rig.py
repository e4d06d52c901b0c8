"""A core with adapters, whose executors are played by the test."""

from __future__ import annotations

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult
from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.adapters.events import AdapterLoaded, AdapterRegistered
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.types import ExecutorSpec, FinishDetail, RequestSpec

KEPT = FinishDetail.ABORTED


class Rig:
    """A core with one executor or more; results come at once, so that a request runs until it is ended."""

    def __init__(
        self, max_loras: int = 2, max_cpu_loras: int = 4, num_lanes: int = 1, policies: Policies | None = None
    ) -> None:
        self.core = Scheduler(policies)
        self.now = 0.0
        self.num_requests = 0
        for lane in range(num_lanes):
            spec = ExecutorSpec(
                16, 1000, 64, 32, 512, 4096, max_loras=max_loras, max_cpu_loras=max_cpu_loras, shares_prefixes=True
            )
            self.core.add_executor(lane, spec)

    def register(self, *indexes: int) -> None:
        for index in indexes:
            self.core.adapter_event(AdapterRegistered(index, f"a{index}", "/a"))

    def commands(self, lane: int = 0) -> tuple[list[int], list[int]]:
        """Loads and unloads."""
        found = self.core.adapter_commands(lane)
        return [each.index for each in found.loads], list(found.unloads)

    def load_all(self, lane: int = 0) -> None:
        while (loads := self.commands(lane)[0]) or False:
            for index in loads:
                self.core.adapter_event(AdapterLoaded(index, b"%d" % index), lane)

    def add(self, adapter: int, *, priority: int = 0, tenant: str = "") -> str:
        self.num_requests += 1
        name = f"r{self.num_requests}"
        spec = RequestSpec(
            name, (1, 2, 3), SequenceSampling(), 4000, adapter_index=adapter, priority=priority, tenant=tenant
        )
        self.core.add_request(spec, self.now)
        return name

    def step(self, lane: int = 0) -> StepPlan | None:
        """Plan a step and apply its result: one token for each that runs."""
        plan = self.core.plan_step(lane, self.now)
        if plan is not None:
            slots = self.core.lanes[lane].inflight[-1].sampling_slots
            self.core.apply_result(lane, StepResult(plan.step_id, slots=slots, token_ids=[7] * len(slots)), self.now)
        self.core.take_outputs()
        self.core.check_integrity()
        return plan

    def end(self, name: str) -> None:
        self.core.abort(next(key for key in self.core.groups if key[1] == name), KEPT)

    def group(self, name: str) -> SequenceGroup:
        return next(group for key, group in self.core.groups.items() if key[1] == name)

    @property
    def running(self) -> set[str]:
        return {sequence.group.key[1] for lane in self.core.lanes.values() for sequence in lane.running}
