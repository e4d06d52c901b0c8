"""What the core keeps for one executor: memory, slots, who runs there, and the plans in flight."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, KeysView
from dataclasses import dataclass, field

from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.cohort import DecodeCohort
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.policy import OrderPolicy
from scheduler_svc.core.queues import RunningQueue
from scheduler_svc.core.sequence import Sequence, held_slot
from scheduler_svc.core.slots import SlotPool
from scheduler_svc.core.types import ExecutorSpec, FinishDetail, SequenceState, StepPlan

_drop: Callable[[int], None] = deque[int](maxlen=0).append
"""Takes a token and forgets it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a sequence that does not decode with the cohort: of its prompt, or what is computed again."""

    sequence: Sequence
    slot: int
    num_tokens: int
    context_len: int
    samples: bool


@dataclass(slots=True)
class PlannedStep:
    """A plan and what it meant when it was made: its result is read against this, never against the present.

    `preempted` and `retired` gave their blocks up before this step, `appended` got a block more.
    """

    plan: StepPlan
    planned_at: float
    cohort_slots: list[int] = field(default_factory=list)
    """Slots of those that decode: one token each, and each samples."""
    chunks: list[Chunk] = field(default_factory=list)
    prompt_logprobs: dict[int, tuple[Sequence, range]] = field(default_factory=dict)
    """By slot: who asked for prompt logprobs, and of which prompt tokens this step gives them."""
    joined: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    retired: list[Sequence] = field(default_factory=list)
    appended: list[tuple[Sequence, int]] = field(default_factory=list)

    @property
    def total_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.cohort_slots) + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def sampling_slots(self) -> list[int]:
        """The slots that sample, ascending."""
        sampling = [chunk.slot for chunk in self.chunks if chunk.samples]
        return sorted(self.cohort_slots + sampling) if sampling else self.cohort_slots

    @property
    def slots(self) -> list[int]:
        """All slots that compute."""
        return [*self.cohort_slots, *(chunk.slot for chunk in self.chunks)]


class Lane:
    """One executor's block manager, slots, running sequences and plans in flight."""

    def __init__(self, spec: ExecutorSpec, policy: OrderPolicy) -> None:
        self.spec = spec
        self._policy = policy
        self.reset()

    def reset(self) -> None:
        """Begin anew with an executor that knows nothing: no blocks, no slots, no plans."""
        spec = self.spec
        self.blocks = BlockManager(spec.num_blocks, spec.block_size, spec.watermark)
        self.slots = SlotPool(spec.num_slots)
        self.running = RunningQueue(self._policy)
        """All that hold a slot and blocks."""
        self.prefilling = RunningQueue(self._policy)
        """Of these, the ones that lack more than one token's KV."""
        self.cohort = DecodeCohort(spec.block_size)
        """The others."""
        self.finishing: dict[Sequence, None] = {}
        """Sequences all of whose tokens are planned: they hold nothing, and wait for results alone."""
        self.retired: list[Sequence] = []
        """Those that came there since the last plan."""
        self.inflight: deque[PlannedStep] = deque()
        self.sequence_at: list[Sequence | None] = [None] * spec.num_slots
        """Who holds a slot, or held it last: what its results belong to until all plans before its release are in."""
        self.append_at: list[Callable[[int], None]] = [_drop] * spec.num_slots
        """Where a slot's token goes."""
        self.dropping: set[int] = set()
        """Slots of sequences that have ended, whose tokens may still come."""
        self._known: set[Sequence] = set()
        self._num_with_stop_id: Counter[int] = Counter()

    def too_long(self, sequence: Sequence) -> FinishDetail | None:
        """Why a waiting sequence has to end here, if it has to: it may have begun when the executor held more."""
        sequence.limit_to_model(self.spec.max_model_len)
        if sequence.fully_planned:
            return sequence.length_detail
        if self.blocks.num_blocks_for(len(sequence.token_ids)) > self.spec.num_blocks:
            return FinishDetail.KV_CAPACITY
        return None

    @property
    def stop_ids(self) -> KeysView[int]:
        """Token ids that end one sequence or another of those that have run here and not ended."""
        return self._num_with_stop_id.keys()

    def enter(self, sequence: Sequence, num_tokens: int) -> int:
        """Give a waiting sequence blocks for so many tokens, at least for its own, and a slot, which is returned."""
        sequence.move(SequenceState.RUNNING)
        self.blocks.allocate(sequence, num_tokens)
        slot = self.slots.take()
        sequence.slot = sequence.last_slot = slot
        self.sequence_at[slot] = sequence
        self.append_at[slot] = sequence.token_ids.append
        self.dropping.discard(slot)
        if sequence not in self._known:
            self._known.add(sequence)
            self._num_with_stop_id.update(sequence.group.stop_ids)
        self.running.add(sequence)
        self.prefilling.add(sequence)
        return slot

    def start_decoding(self, sequence: Sequence) -> None:
        """From the next step on it decodes with the others."""
        self.prefilling.remove(sequence)
        self.cohort.join(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Take memory and slot of a running sequence back."""
        if sequence.decodes:
            self.cohort.leave(sequence)
        else:
            self.prefilling.remove(sequence)
        self.running.remove(sequence)
        self.slots.release(held_slot(sequence))
        sequence.slot = None
        self.blocks.free(sequence)

    def retire(self, sequence: Sequence) -> None:
        """All of its tokens are planned: it leaves its slot and blocks to others; its results are awaited."""
        self.leave(sequence)
        self.finishing[sequence] = None
        self.retired.append(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence that has ended, wherever it is, and what still comes from its slot."""
        if sequence.slot is not None:
            self.leave(sequence)
        self.finishing.pop(sequence, None)
        if sequence in self._known:
            self._known.discard(sequence)
            self._forget_stop_ids(sequence.group.stop_ids)
        slot = sequence.last_slot
        if slot is not None and self.sequence_at[slot] is sequence:
            self.append_at[slot] = _drop
            self.dropping.add(slot)

    def _forget_stop_ids(self, stop_ids: Collection[int]) -> None:
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
        self.blocks.check_integrity(self.running)
        self.slots.check_integrity([held_slot(sequence) for sequence in self.running])
        decoding = [sequence for sequence in self.running if sequence.decodes]
        self.cohort.check_integrity(decoding)
        if list(self.prefilling) != [sequence for sequence in self.running if not sequence.decodes]:
            raise InvariantError("a running sequence neither prefills nor decodes, or does both")
