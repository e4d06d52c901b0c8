"""An executor of the core in a random history: its plans in flight, its deaths and its sessions."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from cadenza_common.plan.plan import StepPlan
from scheduler_svc.core.adapters.events import AdapterFailure, AdapterLoaded, AdapterUnloaded
from scheduler_svc.core.kv_groups import KVGroup
from scheduler_svc.core.memory.paged_pool import PagedPool
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.steps.results import context_lens
from scheduler_svc.core.types import ExecutorSpec, RequestKey, SessionEnd
from tests.helpers.core.core_executor import CoreExecutor
from tests.helpers.core.known import VOCAB_SIZE, adapter_hash
from tests.helpers.executor.digest import check_mirror

BROKEN = "/broken"
"""The path of adapters that cannot be loaded."""


class LaneRig:
    """One executor and the core's lane of it, joined by plans and results."""

    def __init__(self, core: Scheduler, executor_id: int, spec: ExecutorSpec, depth: int) -> None:
        self.core = core
        self.executor_id = executor_id
        self.spec = spec
        self.depth = depth
        self.executor = CoreExecutor(spec, VOCAB_SIZE)
        self.plans: deque[StepPlan] = deque()
        self._free_pages: deque[list[int]] = deque()
        """Of each of these plans, with KV groups: the pages that nobody holds once it has run."""
        self._is_other = False
        """Whether another process has taken the place of the one that the last session was with."""
        self.answers: deque[AdapterLoaded | AdapterUnloaded] = deque()
        """To loads and unloads that were sent, in the order in which they come."""
        core.add_executor(executor_id, spec)

    @property
    def is_open(self) -> bool:
        """Whether it has a session."""
        return self.core.lanes[self.executor_id].is_open

    def plan(self, now: float) -> bool:
        """Plan a step; whether there was one. Unloads take effect after the plans before them, loads at once."""
        self.send_adapters()
        plan = self.core.plan_step(self.executor_id, now)
        if plan is None:
            return False
        plan.debug_digest = self.depth == 1
        self.plans.append(plan)
        pool = self.core.lanes[self.executor_id].blocks.pool
        self._free_pages.append(list(pool.unused_pages) if isinstance(pool, PagedPool) else [])
        return True

    def send_adapters(self) -> None:
        """Send what the core wants to have loaded and unloaded."""
        commands = self.core.adapter_commands(self.executor_id)
        for index in commands.unloads:
            lane = self.core.lanes[self.executor_id]
            assert index not in lane.running.num_by_adapter, "an adapter of a running group is unloaded"
            self.answers.append(AdapterUnloaded(index))
        for registered in commands.loads:
            if registered.path == BROKEN:
                self.answers.append(AdapterLoaded(registered.index, error=AdapterFailure(3, "it is broken")))
            else:
                self.answers.append(AdapterLoaded(registered.index, adapter_hash(registered.index), 1, 1))

    def answer(self) -> None:
        """Let the oldest load or unload be done, once the plans before an unload have run."""
        if not self.answers:
            return
        found = self.answers.popleft()
        if isinstance(found, AdapterUnloaded):
            self.executor.adapters.unload(found.index)
        elif found.error is None:
            self.executor.load(found.index, found.content_hash)
        self.core.adapter_event(found, self.executor_id)

    def apply(self, now: float) -> StepOutputs:
        """Run the oldest plan and apply its result."""
        result = self.executor.run(self.plans.popleft())
        self.executor.spoil(self._free_pages.popleft())
        _, outputs = self.core.apply_result(self.executor_id, result, now)
        if result.debug_digest:
            check_mirror(self.core.lanes[self.executor_id], self.executor.inner.slots, result.debug_digest)
        return outputs

    def dies_in_next_step(self, poisons: Mapping[RequestKey, int]) -> bool:
        """Whether the oldest plan computes the position at which a poisonous request kills its executor."""
        lane = self.core.lanes[self.executor_id]
        step = lane.inflight[0]
        num_tokens = {chunk.sequence: chunk.num_tokens for chunk in step.chunks}
        return any(
            context_len <= poisons[sequence.group.key] < context_len + num_tokens.get(sequence, 1)
            for sequence, context_len in context_lens(lane, step).items()
            if sequence.group.key in poisons
        )

    def lose(self, how: str, num_run: int, now: float, end: SessionEnd | None = None) -> StepOutputs:
        """The session ends with plans in flight, some of them run: KV is kept, or memory is empty or unreadable."""
        if how == "session":
            self.executor.run_in_part(list(self.plans))
        else:
            for plan in list(self.plans)[:num_run]:
                self.executor.run(plan)
        self.plans.clear()
        self._free_pages.clear()
        self.answers.clear()
        if how == "process":
            self.executor, self._is_other = CoreExecutor(self.spec, VOCAB_SIZE), True
        else:
            self.executor.clear()
        return self.core.executor_lost(
            self.executor_id, now, None if how == "session, nothing known" else end or SessionEnd()
        )

    def open_again(self) -> StepOutputs:
        """A new session, with the same process or its successor."""
        same, self._is_other = not self._is_other, False
        loaded = [AdapterLoaded(each.index, each.content_hash, 1, 1) for each in self.executor.adapters.loaded]
        return self.core.session_opened(
            0, executor_id=self.executor_id, same_incarnation=same, keeps_kv=same, adapters=loaded
        )

    def change(self, spec: ExecutorSpec) -> None:
        """Another process with other limits takes its place, while there is no session."""
        self.spec, self._is_other = spec, True
        self.executor = CoreExecutor(spec, VOCAB_SIZE)
        self.core.add_executor(self.executor_id, spec)

    def check_empty(self) -> None:
        """Nothing is left held."""
        lane = self.core.lanes[self.executor_id]
        assert lane.is_empty
        assert lane.blocks.num_free == self.spec.num_blocks
        assert not lane.blocks.num_used_host
        assert not self.executor.slots
        assert lane.slots.num_free == self.spec.num_slots


def first_pages(spec: ExecutorSpec, num_prompt: int, num_sequences: int) -> int:
    """Pages that the first tokens of a request need: its prompt's, and a block for each sequence."""
    size = spec.block_size
    num_full, num_pages = num_prompt // size, 0
    for group in spec.kv_groups or (KVGroup(0),):
        # The last positions that a row reads and 4 before, in whole blocks, wherever a block begins.
        in_window = num_full + 1
        if group.window is not None:
            in_window = min(in_window, -(-(group.window + 4) // size) + 1)
        num_pages += group.pages_per_block * (in_window + num_sequences - 1)
    return num_pages + spec.pages_per_state * num_sequences


def fits_one(rigs: Collection[LaneRig], prompt: tuple[int, ...], num_sequences: int) -> bool:
    """Whether a single executor can hold a request."""
    return any(
        first_pages(rig.spec, len(prompt), num_sequences) <= rig.spec.num_blocks
        and num_sequences <= rig.spec.max_num_seqs
        and len(prompt) + 1 <= rig.spec.max_model_len
        for rig in rigs
    )
