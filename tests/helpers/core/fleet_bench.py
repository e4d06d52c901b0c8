"""A core with several simulated executors, moved on by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Ids
from dataclasses import replace

from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.types import ExecutorSpec, FinishDetail, RequestSpec
from tests.helpers.core.core_sampling import core_sampling
from tests.helpers.core.deltas import deltas
from tests.helpers.core.known import VOCAB_SIZE, known_sample
from tests.helpers.core.lane_rig import LaneRig

SMALL = ExecutorSpec(
    block_size=4,
    num_blocks=64,
    num_slots=8,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=128,
    watermark=0.0,
)


class FleetBench:
    """Requests without beams; every step of an executor takes `tick` seconds."""

    def __init__(
        self, *specs: ExecutorSpec, policies: Policies | None = None, depth: int = 2, tick: float = 0.01
    ) -> None:
        self.core = Scheduler(policies or Policies(prefix_caching=True))
        self.depth, self.tick, self.now = depth, tick, 0.0
        self.rigs: dict[int, LaneRig] = {}
        self.specs: dict[str, RequestSpec] = {}
        self.outputs: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.details: dict[tuple[str, int], FinishDetail] = {}
        self.ran_on: defaultdict[str, list[int]] = defaultdict(list)
        """The executors that admitted each request, in turn."""
        for spec in specs:
            self.join(spec)

    def join(self, spec: ExecutorSpec) -> int:
        """Add an executor; returns its id."""
        executor_id = len(self.rigs)
        self.rigs[executor_id] = LaneRig(self.core, executor_id, spec, self.depth)
        return executor_id

    def add(
        self,
        request_id: str,
        prompt: int | Ids[int] = 6,
        max_tokens: int | None = 8,
        *,
        n: int = 1,
        priority: int = 0,
        **sampling: object,
    ) -> None:
        """Queue a request; a prompt that is a number has so many tokens, 1, 2, 3 and so on."""
        if isinstance(prompt, int):
            prompt = [index % VOCAB_SIZE for index in range(1, prompt + 1)]
        spec = RequestSpec(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=core_sampling(**{"temperature": 1.0, **sampling}),  # type: ignore[arg-type]
            max_tokens=max_tokens,
            num_samples=n,
            priority=priority,
        )
        self.core.add_request(spec, self.now)
        self.specs[request_id] = spec

    def group(self, request_id: str) -> SequenceGroup:
        """An unfinished request."""
        return self.core.groups["", request_id]

    def plan(self, executor_id: int) -> bool:
        """Plan a step; whether there was one."""
        planned = self.rigs[executor_id].plan(self.now)
        self.take(self.core.take_outputs())
        self.core.check_integrity()
        if planned:
            for sequence in self.core.lanes[executor_id].inflight[-1].joined:
                if self.ran_on[sequence.group.spec.request_id][-1:] != [executor_id]:
                    self.ran_on[sequence.group.spec.request_id].append(executor_id)
        return planned

    def apply(self, executor_id: int) -> None:
        """Run the oldest plan of an executor."""
        self.take(self.rigs[executor_id].apply(self.now))
        self.core.check_integrity()

    def step(self, *executor_ids: int) -> None:
        """Each of these executors, or all that have a session, plans as far ahead as it may and ends one step."""
        self.now += self.tick
        for executor_id in executor_ids or list(self.rigs):
            rig = self.rigs[executor_id]
            while rig.is_open and len(rig.plans) < self.depth and self.plan(executor_id):
                pass
            if rig.plans:
                self.apply(executor_id)

    def run(self, max_steps: int = 2_000) -> None:
        """Until every request has ended; then each sample has the tokens that it must have."""
        for _ in range(max_steps):
            if not self.core.groups:
                break
            self.step()
        assert not self.core.groups
        for _ in range(3):
            self.step()
        for rig in self.rigs.values():
            if rig.is_open:
                rig.check_empty()
        for request_id in self.specs:
            self.check(request_id)

    def check(self, request_id: str) -> None:
        """A request that was ended by nothing else has all of its tokens."""
        spec = self.specs[request_id]
        longest = max(rig.spec.max_model_len for rig in self.rigs.values())
        for index in range(spec.num_samples):
            known = known_sample(spec, longest, index)
            assert (self.outputs[request_id, index], self.details[request_id, index]) == known

    def lose(self, executor_id: int, how: str = "process") -> None:
        """An executor's session ends, with the plans in flight run by none."""
        self.take(self.rigs[executor_id].lose(how, 0, self.now))
        self.core.check_integrity()

    def give_up(self, executor_id: int) -> None:
        """The executor is not waited for."""
        self.take(self.core.give_up_executor(executor_id, self.now))
        self.core.check_integrity()

    def remove(self, executor_id: int) -> None:
        """The operator removes an executor."""
        self.take(self.core.remove_executor(executor_id, self.now))
        del self.rigs[executor_id]
        self.core.check_integrity()

    def return_(self, executor_id: int) -> None:
        """A lost executor has a session again."""
        self.take(self.rigs[executor_id].open_again())
        self.core.check_integrity()

    def take(self, outputs: StepOutputs) -> None:
        """Keep what samples got."""
        for delta in deltas(outputs):
            sample = delta.key[1], delta.sample_index
            assert sample not in self.details
            self.outputs[sample] += delta.token_ids
            if delta.finish is not None:
                self.details[sample] = delta.finish.detail


def spec(**changes: object) -> ExecutorSpec:
    """A small executor's limits with changes."""
    return replace(SMALL, **changes)  # type: ignore[arg-type]
