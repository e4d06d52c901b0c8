"""The core's state of one executor: KV blocks, batch slots, running sequences, and plans in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, KeysView

from cadenza_common.plan.result import StepResult
from scheduler_svc.core.adapters.lane_adapters import LaneAdapters
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.lanes.draft_control import DraftControl
from scheduler_svc.core.lanes.draft_limits import allow_drafts
from scheduler_svc.core.lanes.lane_counts import LaneCounts
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.lanes.slot_pool import SlotPool
from scheduler_svc.core.lanes.stop_ids import StopIds
from scheduler_svc.core.lanes.stored_tokens import num_filled, num_reserved_blocks, num_stored_tokens
from scheduler_svc.core.lanes.turnover import BatchingState, Turnover
from scheduler_svc.core.memory.block_manager import BlockManager
from scheduler_svc.core.memory.rates import MeasuredRates
from scheduler_svc.core.queues.orders import OrderPolicy
from scheduler_svc.core.queues.queues import RunningQueue
from scheduler_svc.core.sequences.decode_batch import DecodeBatch
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup, held_slot
from scheduler_svc.core.types import ExecutorSpec, FinishDetail, SequenceState

_NO_TOKENS: list[int] = []  # of a slot from which none are expected


class Lane:
    """One executor's block manager, slots, running sequences and plans in flight."""

    def __init__(
        self, executor_id: int, spec: ExecutorSpec, policy: OrderPolicy, *, prefix_caching: bool = False
    ) -> None:
        self.executor_id = executor_id
        self.spec = spec
        self.counts = LaneCounts()
        self.batching = BatchingState()
        self.is_open = True
        """Whether there is a session with the executor; groups are placed on open lanes only."""
        self.draining = False
        """Whether it takes no new groups, and its running groups move to other lanes."""
        self.unexplained: frozenset[SequenceGroup] = frozenset()
        """Groups that may have ended the last session, while it is not known whether they killed the executor."""
        self.order = policy
        self._caching = prefix_caching and spec.shares_prefixes
        self._sizes = spec.group_sizes
        self.rates = MeasuredRates()
        self.turnover = Turnover()
        self.adapters = LaneAdapters(spec.max_loras, spec.max_cpu_loras)
        self.draft_control = DraftControl(spec.max_drafts, adaptive=spec.adaptive_drafts)
        self.last_result_at = 0.0  # when the last result was applied
        self.inflight: deque[PlannedStep] = deque()
        self.reset()

    def succeed(self, former: Lane) -> None:
        """Take the place of a lost executor's lane: counts never go back."""
        self.counts, self.batching, self.draining = former.counts, former.batching, former.draining
        self.blocks.prefix_counts = self.counts.prefixes

    def reset(self) -> None:
        """Start over with an empty executor: no blocks, no slots, no plans."""
        spec = self.spec
        self.blocks = BlockManager(
            spec.num_blocks,
            spec.block_size,
            spec.watermark,
            num_host_blocks=spec.num_host_blocks,
            caching=self._caching,
            rates=self.rates,
            prefix_counts=self.counts.prefixes,
            sizes=self._sizes,
            num_ids=self._num_block_ids,
        )
        self.running = RunningQueue(self.order)
        """Running sequences: each holds a slot and blocks."""
        self.swapped: dict[Sequence, None] = {}
        """Sequences whose KV is in the host pool."""
        self._stop_ids = StopIds()
        self.reset_session()

    def reset_session(self) -> None:
        """Start over with the executor's slots empty: no plans. Running sequences keep their slots and blocks here."""
        spec = self.spec
        if self.blocks.snapshots is not None:
            self.blocks.snapshots.clear()
        holders = {held_slot(sequence): sequence for sequence in self.running}
        self.slots = SlotPool(spec.num_slots, holders)
        self.prefilling = RunningQueue(self.order)
        """Running sequences with more to compute than one token per step, or newly admitted."""
        self.decode_batch = DecodeBatch(spec.block_size)
        """Running sequences that decode; without beams and sequences that wait for their group's prompt."""
        self.due_beam_groups: dict[SequenceGroup, None] = {}
        """Groups whose beams have a token to compute."""
        self.pending_copy_on_write: dict[Sequence, bool] = {}
        """Forked sequences whose next token goes to a block that they still share. The value: the executor's block
        table of the sequence lacks that block."""
        self.resuming: dict[Sequence, None] = {}
        """Sequences held until now: they decode from the next step on."""
        self.suspects_catch_up = False
        """Whether the last step computed tokens of suspects before their suspected positions."""
        self.stale_slots: list[int] = []
        """Slots that the next plan releases on the executor although a sequence keeps them here."""
        self.finishing: dict[Sequence, None] = {}
        """Sequences whose tokens are all planned: they hold no slot and no blocks, and only await results."""
        self.retired: list[Sequence] = []
        """Sequences added to `finishing` since the last plan."""
        # Emptied, not replaced: nothing may keep lost plans and their sequences.
        self.inflight.clear()
        self.sequence_at: list[Sequence | None] = [holders.get(slot) for slot in range(spec.num_slots)]
        """By slot: its holder, or its last holder, to which the results of plans before the slot's release belong.

        None once these results are in: a sequence that has ended is not kept.
        """
        self.tokens_at: list[list[int]] = [
            _NO_TOKENS if sequence is None else sequence.output_ids for sequence in self.sequence_at
        ]
        """By slot: the output tokens of its sequence. New tokens of the slot are appended here."""
        self.discarding_slots: set[int] = set()
        """Slots of finished sequences, for which tokens may still arrive."""
        self.vacated: dict[int, int] = {}
        """Slots without a holder: the step after whose result nothing refers to the last holder. Ascending steps."""

    def length_finish_detail(self, sequence: Sequence) -> FinishDetail | None:
        """The reason to finish a waiting sequence that this executor cannot hold; None if it can.

        The sequence may have started on an executor with larger limits.
        """
        sequence.apply_max_model_len(self.spec.max_model_len)
        if sequence.fully_planned:
            return sequence.length_detail
        if self.blocks.num_pages_for(self.blocks.num_blocks_for(sequence.num_tokens)) > self.spec.num_blocks:
            return FinishDetail.KV_CAPACITY
        return None

    @property
    def stop_ids(self) -> KeysView[int]:
        """The union of the stop ids of all unfinished sequences that have run here."""
        return self._stop_ids.union

    def holds(self, group: SequenceGroup, *, swapped: bool = True) -> bool:
        """Whether something of a group is here: a running or swapped sequence, or a plan in flight that refers to it.

        Without `swapped`, KV in the host pool does not count. A group that may have killed the executor stays until
        that is known.
        """
        if group.lane_id != self.executor_id:
            return False
        if group in self.unexplained:
            return True
        if self.inflight and self.inflight[0].plan.step_id <= group.held_until:
            return True
        states = (SequenceState.RUNNING, SequenceState.SWAPPED) if swapped else (SequenceState.RUNNING,)
        return any(sequence.state in states for sequence in group.sequences)

    @property
    def is_empty(self) -> bool:
        """Whether it holds no sequence and no plan is in flight."""
        return not (len(self.running) or self.swapped or self.finishing or self.inflight)

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens whose KV the pool holds, of one sequence where there are KV groups."""
        spec = self.spec
        if self._sizes is None:
            return spec.num_blocks * spec.block_size
        return self._sizes.capacity(spec.num_blocks, spec.max_model_len)

    @property
    def _num_block_ids(self) -> int:
        """More blocks than its sequences, swapped out or not, hold at once where blocks may have no pages."""
        spec = self.spec
        return 2 * (spec.max_num_seqs + spec.num_slots) * (2 + spec.max_model_len // spec.block_size)

    @property
    def num_prefill_tokens(self) -> int:
        """Number of tokens that running sequences outside the decode batch have yet to compute."""
        return sum(sequence.num_uncomputed_tokens for sequence in self.prefilling)

    def forget(self, sequence: Sequence) -> None:
        """Forget a waiting sequence that is about to run on another executor; nothing here refers to it."""
        self._stop_ids.remove((sequence,))

    def start_running(self, sequence: Sequence) -> None:
        """Give a waiting sequence a slot; the caller allocates its blocks."""
        sequence.change_state(SequenceState.RUNNING)
        slot = self.slots.take()
        sequence.slot = sequence.last_slot = slot
        self.sequence_at[slot] = sequence
        self.tokens_at[slot] = sequence.output_ids
        self.discarding_slots.discard(slot)
        self.vacated.pop(slot, None)
        if self.swapped:
            self.swapped.pop(sequence, None)
        self._stop_ids.add((sequence,))
        self.running.add(sequence)
        if not (sequence.awaits_fork or sequence.is_spare_beam):
            self.prefilling.add(sequence)

    def start_all(self, sequences: list[Sequence]) -> list[int]:
        """Start sequences that have never run, each alone in its group, for a step that computes all of their tokens.

        They have blocks, and decode from the next step on. Returns their slots, in the same order. It does what
        `start_running` and `start_decoding` do for each.
        """
        slots = self.slots.take_all(len(sequences))
        if self.spec.max_drafts:
            allow_drafts(sequences, self.spec)
        self.decode_batch.start_all(sequences, slots)
        for sequence, slot in zip(sequences, slots, strict=True):
            self.sequence_at[slot] = sequence
            self.tokens_at[slot] = sequence.output_ids
            self.vacated.pop(slot, None)
        self.discarding_slots.difference_update(slots)
        self._stop_ids.add(sequences)
        self.running.add_all(sequences)
        return slots

    def finish_all(self, sequences: list[Sequence]) -> None:
        """Finish sequences of the decode batch, each alone in its group: what `drop` does for each.

        Tokens that still arrive from their slots are discarded.
        """
        slots = self.decode_batch.finish_all(sequences)
        self.blocks.free_all(sequences)
        for sequence in sequences if self.blocks.snapshots is not None else ():
            self._release_saves(sequence)
        self.running.remove_all(sequences)
        self.slots.release_all(slots)
        self.discarding_slots.update(slots)
        self._stop_ids.remove(sequences)

    def start_decoding(self, sequence: Sequence) -> None:
        """Add a sequence to the decode batch, from the next step on."""
        if len(self.prefilling):
            self.prefilling.discard(sequence)
        self.decode_batch.join(sequence)

    def stop_running(self, sequence: Sequence, *, keeps_blocks: bool = False, invalid_kv: bool = False) -> None:
        """Release the slot of a running sequence, and its blocks unless `keeps_blocks` (for a swap-out).

        With `invalid_kv` its blocks leave the prefix cache.
        """
        if sequence.is_decoding:
            self.decode_batch.leave(sequence)
        else:
            self.prefilling.discard(sequence)
        self.running.remove(sequence)
        if len(sequence.group.sequences) > 1:
            self.pending_copy_on_write.pop(sequence, None)
            self._release_shared(sequence)
        self.resuming.pop(sequence, None)
        slot = held_slot(sequence)
        if sequence.described:
            self.slots.release(slot)
        else:
            self.slots.free(slot)
            self._vacate(slot)
        sequence.slot, sequence.described = None, False
        if not keeps_blocks:
            self.blocks.free(sequence, invalid_kv=invalid_kv)
        self._release_saves(sequence)

    def _release_saves(self, sequence: Sequence) -> None:
        """The executor drops what is armed for a slot that is released by the plan being made, or by the next one."""
        if self.blocks.snapshots is not None:
            self.blocks.snapshots.release(sequence, self.counts.last_step_id + 1)

    def take_released_slots(self, step_id: int) -> list[int]:
        """The slots that the plan of this step releases on the executor."""
        released = self.slots.take_released(step_id)
        self.vacated.update(dict.fromkeys(released, step_id))
        return released

    def on_result(self, step_id: int) -> None:
        """Record a step's result: slots become free, and the last holders of vacated slots are forgotten."""
        self.slots.on_result(step_id)
        if self.blocks.snapshots is not None:
            self.blocks.snapshots.pass_step(step_id)
        passed = []
        for slot, newest_step_id in self.vacated.items():
            if newest_step_id > step_id:
                break
            passed.append(slot)
        for slot in passed:
            del self.vacated[slot]
            self._forget_holder(slot)

    def _vacate(self, slot: int) -> None:
        """Forget the last holder of a free slot once the plans in flight have their results."""
        if self.inflight:
            self.vacated[slot] = self.inflight[-1].plan.step_id
        else:
            self._forget_holder(slot)

    def _forget_holder(self, slot: int) -> None:
        self.sequence_at[slot] = None
        self.tokens_at[slot] = _NO_TOKENS
        self.discarding_slots.discard(slot)

    def swap_out(self, sequences: list[Sequence]) -> None:
        """Stop running sequences and move their KV to the host pool; InvariantError if it has too few free blocks."""
        for sequence in sequences:
            self.stop_running(sequence, keeps_blocks=True)
            self.swapped[sequence] = None
        if not self.blocks.swap_out(sequences):
            raise InvariantError("the host pool has too few free blocks for a swap-out")

    def drop_swapped(self, sequence: Sequence) -> None:
        """Free the host blocks of a swapped-out sequence."""
        del self.swapped[sequence]
        self.blocks.free(sequence)

    def _release_shared(self, leaver: Sequence) -> None:
        """Release what ties a sequence that stops running to its group.

        Sequences that await KV from it compute that KV themselves. Beams stop all together: the group has no due beams
        any more, and its reserved blocks are freed.
        """
        leaver.stop_awaiting_kv()
        for sequence in self.prefilling:
            if sequence.kv_source is leaver:
                sequence.stop_awaiting_kv()
                if self.blocks.windows is not None:
                    self.blocks.windows.join(leaver, sequence)
        self.due_beam_groups.pop(leaver.group, None)
        self.blocks.free_taken(leaver.group.reserved_blocks)
        leaver.group.reserved_blocks = []

    def retire(self, sequence: Sequence) -> None:
        """Free the slot and blocks of a sequence whose tokens are all planned; only its results are awaited."""
        self.stop_running(sequence)
        self.finishing[sequence] = None
        self.retired.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Remove a finished sequence in any state; tokens that still arrive from its slot are discarded."""
        if sequence.slot is not None:
            self.stop_running(sequence)
        elif sequence in self.swapped:
            self.drop_swapped(sequence)
        self.finishing.pop(sequence, None)
        self.forget(sequence)
        slot = sequence.last_slot
        # The slot may date from an executor with more slots.
        if slot is not None and slot < self.spec.num_slots and self.sequence_at[slot] is sequence:
            self.discarding_slots.add(slot)

    @property
    def num_reserved_tokens(self) -> int:
        """Token slots that running sequences hold in blocks beyond those of their tokens."""
        num_blocks = num_reserved_blocks(self.blocks, self.running, self.prefilling, self.decode_batch)
        return num_blocks * self.spec.block_size

    def num_distinct_tokens(self, sequences: Collection[Sequence]) -> int:
        """Number of tokens whose KV the blocks of these running sequences store; shared blocks count once."""
        return num_filled(sequences, self.spec.block_size)

    @property
    def num_stored_tokens(self) -> int:
        """Number of tokens whose KV the pool stores for running sequences."""
        return num_stored_tokens(self.blocks, self.running, self.prefilling, self.decode_batch)

    @property
    def num_running_groups(self) -> int:
        """Number of groups with a sequence that runs, or whose last results are awaited."""
        return self.running.num_groups(self.finishing)

    def update_rates(self, step: PlannedStep, result: StepResult) -> None:
        """Update the measured rates with a result's timings."""
        plan, timings = step.plan, result.timings
        num_swapped = 0 if plan.copies else len(plan.swap_out) + len(plan.swap_in)
        num_tokens = step.total_tokens + sum(result.num_accepted)
        self.rates.observe(num_tokens, num_swapped, timings.device_ns, timings.moves_ns)

    def update_turnover(self, num_finished: int, now: float) -> None:
        """Update the measured time between finishes after a result with which so many samples finished."""
        self.last_result_at = now
        if num_finished:
            self.turnover.observe(num_finished, now)
        if not len(self.running):
            self.turnover.pause()
