"""Step records for watches: `cadenza demo`, `cadenza top`, the load test."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids
from functools import partial

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.steps.results import context_lens
from scheduler_svc.engine.page_changes import NO_CHANGES, PageChanges, block_changes, freed_pages, page_changes
from scheduler_svc.plan_loop.gauges import Load
from scheduler_svc.plan_loop.ports import StepRecord

_MAX_RECORDS = 4096
_MAX_AT_ONCE = 64
"""Maximum records per message: writing thousands would block the event loop and delay steps."""


class StepRecordWatch:
    """The records of one watch. A slow reader loses the newest ones and gets their number; steps never wait for it.

    Use it as an async context manager, then iterate: each item is (records, number lost so far), the first at once.
    """

    def __init__(self, watches: set[StepRecordWatch], *, include_block_tables: bool) -> None:
        self.include_block_tables = include_block_tables
        self._watches = watches
        self._records: deque[StepRecord] = deque()
        self._num_dropped = 0
        self._outputs = asyncio.Event()
        self._outputs.set()

    async def __aenter__(self) -> StepRecordWatch:
        self._watches.add(self)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._watches.discard(self)

    def __aiter__(self) -> StepRecordWatch:
        return self

    async def __anext__(self) -> tuple[list[StepRecord], int]:
        await self._outputs.wait()
        records = [self._records.popleft() for _ in range(min(len(self._records), _MAX_AT_ONCE))]
        if not self._records:
            self._outputs.clear()
        return records, self._num_dropped

    @property
    def has_records(self) -> bool:
        """Whether the next records are there."""
        return bool(self._records)

    def put(self, record: StepRecord) -> None:
        """Add a record, or count it as lost if the watch is full."""
        if len(self._records) < _MAX_RECORDS:
            self._records.append(record)
        else:
            self._num_dropped += 1
        self._outputs.set()


class StepRecorder:
    """Turns planned steps and their results into records while there are watches."""

    def __init__(self, load: Callable[[], Load], started_ns: int) -> None:
        self.watches: set[StepRecordWatch] = set()
        self._load = load
        self._started_ns = started_ns
        self._loads: dict[tuple[int, int], Load] = {}
        """By executor and step."""
        self._freed: dict[tuple[int, int], list[int]] = {}
        """The same. What a plan frees may be in tables of plans before it, which are recorded first."""
        self._first_token_ns: list[int] = []
        self._left: list[tuple[int, int]] = []

    def on_planned(self, lanes: Mapping[int, Lane], plan: StepPlan) -> None:
        """Keep the current load for a planned step, and the pages freed since the one before."""
        if self.watches:
            self._loads[plan.executor_id, plan.step_id] = self._load()
            self._freed[plan.executor_id, plan.step_id] = freed_pages(lanes[plan.executor_id])

    def on_first_token(self, since_arrival_ns: int) -> None:
        """Keep the time to first token of a request for the next record."""
        if self.watches:
            self._first_token_ns.append(since_arrival_ns)

    def on_finished(self, sequences: list[Sequence]) -> None:
        """Keep the ids and token counts of finished sequences for the next record.

        Only admitted sequences count: they are few while no step is recorded, however many requests are aborted.
        """
        if self.watches:
            admitted = [sequence for sequence in sequences if sequence.last_slot is not None]
            self._left += [(sequence.sequence_id, sequence.num_output_tokens) for sequence in admitted]
        else:
            self._first_token_ns, self._left = [], []
            self._loads.clear()
            self._freed.clear()

    def record_later(
        self, lane: Lane, step: PlannedStep, result: StepResult, outputs: StepOutputs, now: float
    ) -> Callable[[], None] | None:
        """The call that records a step whose result was applied, after its outputs are delivered; None: no watch."""
        if not self.watches:
            return None
        applied: Mapping[Sequence, int] = dict.fromkeys(outputs.sequences, 1)
        if len(applied) < len(outputs.sequences):
            applied = Counter(outputs.sequences)
        contexts = context_lens(lane, step, applied=applied)
        freed = self._freed.pop((step.plan.executor_id, step.plan.step_id), [])
        return partial(self.on_applied, step, contexts, result, now, page_changes(lane, step, freed))

    def on_applied(
        self,
        step: PlannedStep,
        contexts: dict[Sequence, int],
        result: StepResult,
        now: float,
        pages: PageChanges = NO_CHANGES,
    ) -> None:
        """Record a step whose result was applied. contexts: context length of each sequence before the step."""
        load = self._loads.pop((step.plan.executor_id, step.plan.step_id), None)
        record = self._record(step, contexts, result, load or self._load(), now, pages)
        self._first_token_ns, self._left = [], []
        for watch in self.watches:
            watch.put(record)

    def on_session_ended(self, executor_id: int) -> None:
        """Drop the loads of an executor's plans in flight, which are lost."""
        for kept in (self._loads, self._freed):
            for key in [key for key in kept if key[0] == executor_id]:
                del kept[key]

    def _record(
        self,
        step: PlannedStep,
        contexts: dict[Sequence, int],
        result: StepResult,
        load: Load,
        now: float,
        pages: PageChanges,
    ) -> StepRecord:
        counts = result.num_tokens or [1] * len(result.slots)
        # As a rule all decode and sample, which takes no look at each.
        is_plain = not step.chunks and result.slots == step.decode_slots
        sampled = {} if is_plain else _by_slot(result.slots, counts)
        has_drafts = any(result.num_drafts)
        drafts, accepted = _by_slot(result.slots, result.num_drafts), _by_slot(result.slots, result.num_accepted)
        chunks = {chunk.sequence: chunk.num_tokens for chunk in step.chunks}
        return StepRecord(
            step_id=step.plan.step_id,
            executor_id=step.plan.executor_id,
            planned_ns=int(step.planned_at * 1e9) - self._started_ns,
            applied_ns=int(now * 1e9) - self._started_ns,
            result=result,
            joined=[
                (s.sequence_id, s.group.spec.request_id, s.sample_index, s.num_prompt_tokens, slot)
                for s, slot in zip(step.joined, step.joined_slots, strict=True)
            ],
            sequence_ids=[sequence.sequence_id for sequence in contexts],
            num_tokens=[chunks.get(sequence, 1) for sequence in contexts] if chunks else [1] * len(contexts),
            context_lens=list(contexts.values()),
            num_sampled=counts if is_plain else [sampled.get(sequence.last_slot, 0) for sequence in contexts],
            num_drafts=[drafts.get(sequence.last_slot, 0) for sequence in contexts] if has_drafts else (),
            num_accepted_drafts=([accepted.get(sequence.last_slot, 0) for sequence in contexts] if has_drafts else ()),
            left=self._left,
            preempted_ids=[sequence.sequence_id for sequence in step.preempted],
            swapped_out_ids=[sequence.sequence_id for sequence in step.swapped_out],
            swapped_in_ids=[sequence.sequence_id for sequence in step.swapped_in],
            first_token_ns=self._first_token_ns,
            load=load,
            block_changes=block_changes(step, pages),
            state_copies=pages.state_copies,
            freed_pages=pages.freed,
        )


def _by_slot(slots: Ids[int], counts: Ids[int]) -> dict[int | None, int]:
    """Counts by slot; none if there are no counts. A sequence that has never run has no slot, and so no count."""
    return dict(zip(slots, counts, strict=True)) if counts else {}
