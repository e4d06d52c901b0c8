"""What the core keeps for one executor: memory, slots, who runs there, and the plans in flight."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, KeysView

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.lanes.slot_pool import SlotPool
from scheduler_svc.core.memory.block_manager import BlockManager
from scheduler_svc.core.memory.rates import MeasuredRates
from scheduler_svc.core.queues.orders import OrderPolicy
from scheduler_svc.core.queues.queues import RunningQueue
from scheduler_svc.core.sequences.decode_batch import DecodeBatch
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup, held_slot
from scheduler_svc.core.types import ExecutorSpec, FinishDetail, SequenceState, StepResult

_discard: Callable[[int], None] = deque[int](maxlen=0).append
"""Takes a token and forgets it."""


class Lane:
    """One executor's block manager, slots, running sequences and plans in flight."""

    def __init__(self, spec: ExecutorSpec, policy: OrderPolicy, *, prefix_caching: bool = False) -> None:
        self.spec = spec
        self._policy = policy
        self._caching = prefix_caching and spec.shares_prefixes
        self.rates = MeasuredRates()
        self.reset()

    def reset(self) -> None:
        """Begin anew with an executor that knows nothing: no blocks, no slots, no plans."""
        spec = self.spec
        self.blocks = BlockManager(
            spec.num_blocks,
            spec.block_size,
            spec.watermark,
            num_host_blocks=spec.num_host_blocks,
            caching=self._caching,
            rates=self.rates,
        )
        self.slots = SlotPool(spec.num_slots)
        self.running = RunningQueue(self._policy)
        """All that hold a slot and blocks."""
        self.prefilling = RunningQueue(self._policy)
        """Of these, the ones that have more to compute than a token a step, or have just come in."""
        self.decode_batch = DecodeBatch(spec.block_size)
        """Of these, the ones that decode. The others are beams, or wait for their group's prompt."""
        self.due_beam_groups: dict[SequenceGroup, None] = {}
        """Groups whose beams have tokens to compute."""
        self.pending_copy_on_write: dict[Sequence, bool] = {}
        """Those whose next token goes to a block that they share since they forked; does the executor lack it."""
        self.resuming: dict[Sequence, None] = {}
        """Those that have forked, and decode from the next step on."""
        self.stale_slots: list[int] = []
        """Slots that keep their sequence, which the executor is to forget."""
        self.swapped: dict[Sequence, None] = {}
        """Sequences whose KV is in the host pool."""
        self.finishing: dict[Sequence, None] = {}
        """Sequences all of whose tokens are planned: they hold nothing, and wait for results alone."""
        self.retired: list[Sequence] = []
        """Those that came there since the last plan."""
        self.inflight: deque[PlannedStep] = deque()
        self.sequence_at: list[Sequence | None] = [None] * spec.num_slots
        """Who holds a slot, or held it last: what its results belong to until all plans before its release are in."""
        self.append_at: list[Callable[[int], None]] = [_discard] * spec.num_slots
        """Where a slot's token goes."""
        self.discarding_slots: set[int] = set()
        """Slots of sequences that have ended, whose tokens may still come."""
        self._known: set[Sequence] = set()
        self._num_with_stop_id: Counter[int] = Counter()

    def length_finish_detail(self, sequence: Sequence) -> FinishDetail | None:
        """Why a waiting sequence has to end here, if it has to: it may have begun when the executor held more."""
        sequence.apply_max_model_len(self.spec.max_model_len)
        if sequence.fully_planned:
            return sequence.length_detail
        if self.blocks.num_blocks_for(len(sequence.token_ids)) > self.spec.num_blocks:
            return FinishDetail.KV_CAPACITY
        return None

    @property
    def stop_ids(self) -> KeysView[int]:
        """Token ids that end one sequence or another of those that have run here and not ended."""
        return self._num_with_stop_id.keys()

    def start_running(self, sequence: Sequence) -> None:
        """Give a waiting sequence a slot; its blocks are given by whoever lets it in."""
        sequence.move(SequenceState.RUNNING)
        slot = self.slots.take()
        sequence.slot = sequence.last_slot = slot
        self.sequence_at[slot] = sequence
        self.append_at[slot] = sequence.token_ids.append
        self.discarding_slots.discard(slot)
        self.swapped.pop(sequence, None)
        if sequence not in self._known and not sequence.is_beam:
            self._known.add(sequence)
            self._num_with_stop_id.update(sequence.group.stop_ids)
        self.running.add(sequence)
        if not (sequence.awaits_fork or sequence.is_spare_beam):
            self.prefilling.add(sequence)

    def start_decoding(self, sequence: Sequence) -> None:
        """From the next step on it decodes with the others."""
        self.prefilling.discard(sequence)
        self.decode_batch.join(sequence)

    def stop_running(self, sequence: Sequence, *, keeps_blocks: bool = False, spoiled: bool = False) -> None:
        """Take the slot of a running sequence back, and its memory, unless it keeps its blocks to be swapped out.

        Spoiled KV leaves the prefix cache.
        """
        if sequence.is_decoding:
            self.decode_batch.leave(sequence)
        else:
            self.prefilling.discard(sequence)
        self.running.remove(sequence)
        self.pending_copy_on_write.pop(sequence, None)
        self.resuming.pop(sequence, None)
        if len(sequence.group.sequences) > 1:
            self._release_shared(sequence)
        slot = held_slot(sequence)
        if sequence.described:
            self.slots.release(slot)
        else:
            self.slots.put_back(slot)
        sequence.slot, sequence.described = None, False
        if not keeps_blocks:
            self.blocks.free(sequence, spoiled=spoiled)

    def swap_out(self, sequences: list[Sequence]) -> None:
        """Move the KV of running sequences to the host pool, which must have room; they leave."""
        for sequence in sequences:
            self.stop_running(sequence, keeps_blocks=True)
            self.swapped[sequence] = None
        if not self.blocks.swap_out(sequences):
            raise InvariantError("the host pool has no room for a group that is swapped out")

    def drop_swapped(self, sequence: Sequence) -> None:
        """Drop the KV of a sequence that is swapped out."""
        del self.swapped[sequence]
        self.blocks.free(sequence)

    def _release_shared(self, leaver: Sequence) -> None:
        """What others share with one that leaves, and that is not there yet, they compute themselves.

        Beams leave all together: their turn is over, and what was reserved for them is free.
        """
        leaver.stop_awaiting_kv()
        for sequence in self.prefilling:
            if sequence.kv_source is leaver:
                sequence.stop_awaiting_kv()
        self.due_beam_groups.pop(leaver.group, None)
        self.blocks.put_back(leaver.group.reserve)
        leaver.group.reserve = []

    def retire(self, sequence: Sequence) -> None:
        """All of its tokens are planned: it leaves its slot and blocks to others; its results are awaited."""
        self.stop_running(sequence)
        self.finishing[sequence] = None
        self.retired.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Drop a sequence that has ended, wherever it is, and what still comes from its slot."""
        if sequence.slot is not None:
            self.stop_running(sequence)
        elif sequence in self.swapped:
            self.drop_swapped(sequence)
        self.finishing.pop(sequence, None)
        if sequence in self._known:
            self._known.discard(sequence)
            self._drop_stop_ids(sequence.group.stop_ids)
        slot = sequence.last_slot
        # It may have had its slot on an executor that held more.
        if slot is not None and slot < self.spec.num_slots and self.sequence_at[slot] is sequence:
            self.append_at[slot] = _discard
            self.discarding_slots.add(slot)

    @property
    def _groups(self) -> set[SequenceGroup]:
        return {sequence.group for sequence in self.running}

    @property
    def num_reserved_tokens(self) -> int:
        """Token slots that those that run hold beyond those of their tokens."""
        blocks = sum(map(self.blocks.num_reserved, self.running)) + sum(len(group.reserve) for group in self._groups)
        return blocks * self.spec.block_size

    def num_distinct_tokens(self, sequences: Collection[Sequence]) -> int:
        """Tokens whose KV the blocks of running sequences store; what several share counts once."""
        fill: dict[int, int] = {}
        size = self.spec.block_size
        for sequence in sequences:
            num_computed = sequence.num_computed_tokens
            for block_id in sequence.block_ids[: self.blocks.num_blocks_for(num_computed)]:
                fill[block_id] = max(fill.get(block_id, 0), min(size, num_computed))
                num_computed -= size
        return sum(fill.values())

    @property
    def num_stored_tokens(self) -> int:
        """Tokens whose KV the pool stores for those that run."""
        if self.blocks.num_shared_refs:
            return self.num_distinct_tokens(self.running.sequences)
        return sum(sequence.num_computed_tokens for sequence in self.running)

    def observe(self, step: PlannedStep, result: StepResult) -> None:
        """Learn from a result what computing and moving cost."""
        plan = step.plan
        num_swapped = 0 if plan.copied else len(plan.swapped_out) + len(plan.swapped_in)
        self.rates.observe(step.total_tokens, num_swapped, result.device_ns, result.moves_ns)

    def _drop_stop_ids(self, stop_ids: Collection[int]) -> None:
        counts = self._num_with_stop_id
        for stop_id in stop_ids:
            if counts[stop_id] == 1:
                del counts[stop_id]
            else:
                counts[stop_id] -= 1

    def check_integrity(self) -> None:
        """Prove that blocks, slots and states of this lane add up; raises InvariantError."""
        for sequence in self.running:
            if sequence.state is not SequenceState.RUNNING:
                raise InvariantError(f"sequence {sequence.sequence_id} runs in state {sequence.state.name}")
            if self.sequence_at[held_slot(sequence)] is not sequence:
                raise InvariantError(f"slot {sequence.slot} does not know sequence {sequence.sequence_id}")
        reserved = [block_id for group in self._groups for block_id in group.reserve]
        self.blocks.check_integrity([*self.running, *self.swapped], reserved)
        self.slots.check_integrity([held_slot(sequence) for sequence in self.running])
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        self.decode_batch.check_integrity(decoding)
        prefilling = set(self.prefilling)
        for sequence in self.running:
            if sequence.is_decoding and sequence in prefilling:
                raise InvariantError(f"sequence {sequence.sequence_id} prefills and decodes")
            busy = sequence.is_decoding or sequence in prefilling
            if not (busy or sequence.awaits_fork or sequence.is_beam):
                raise InvariantError(f"sequence {sequence.sequence_id} runs and does nothing")
        if not prefilling.issubset(self.running):
            raise InvariantError("a sequence prefills that does not run")
