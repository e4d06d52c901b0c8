"""What the core keeps for one executor: memory, slots, who runs there, and the plans in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.policy import OrderPolicy, RunningQueue
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.slots import SlotPool
from scheduler_svc.core.types import ExecutorSpec, FinishDetail, SequenceState, StepPlan


@dataclass(slots=True)
class PlannedStep:
    """A plan and what it meant when it was made: its result is read against this, never against the present.

    `preempted` and `retired` gave their blocks up when this step was planned, `appended` got a block more.
    """

    plan: StepPlan
    planned_at: float
    sequences: list[Sequence] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    context_lens: list[int] = field(default_factory=list)
    sampling_slots: dict[int, Sequence] = field(default_factory=dict)
    joined: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    retired: list[Sequence] = field(default_factory=list)
    appended: list[tuple[Sequence, int]] = field(default_factory=list)

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence its next tokens in this step; it samples once all of its tokens are computed."""
        self.sequences.append(sequence)
        self.num_tokens.append(num_tokens)
        self.context_lens.append(sequence.num_computed_tokens)
        sequence.num_computed_tokens += num_tokens
        if sequence.num_uncomputed_tokens == 0:
            sequence.num_pending += 1
            self.sampling_slots[held_slot(sequence)] = sequence

    @property
    def total_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(self.num_tokens)


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
        self.finishing: list[Sequence] = []
        """Sequences all of whose tokens are planned: they hold nothing, and wait for results alone."""
        self.inflight: deque[PlannedStep] = deque()

    def too_long(self, sequence: Sequence) -> FinishDetail | None:
        """Why a waiting sequence has to end here, if it has to: it may have begun when the executor held more."""
        sequence.limit_to_model(self.spec.max_model_len)
        if sequence.fully_planned:
            return sequence.length_detail
        if self.blocks.num_blocks_for(len(sequence.token_ids)) > self.spec.num_blocks:
            return FinishDetail.KV_CAPACITY
        return None

    def leave(self, sequence: Sequence) -> None:
        """Take memory and slot of a running sequence back."""
        self.running.remove(sequence)
        self.slots.release(held_slot(sequence))
        sequence.slot = None
        self.blocks.free(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence that has ended, wherever it is."""
        if sequence.slot is not None:
            self.leave(sequence)
        elif sequence in self.finishing:
            self.finishing.remove(sequence)

    def check_integrity(self) -> None:
        """Prove that blocks, slots and states of this lane add up; raises InvariantError."""
        for sequence in self.running:
            if sequence.state is not SequenceState.RUNNING:
                raise InvariantError(f"sequence {sequence.sequence_id} runs in state {sequence.state.name}")
        self.blocks.check_integrity(self.running)
        self.slots.check_integrity([held_slot(sequence) for sequence in self.running])


def held_slot(sequence: Sequence) -> int:
    """The slot of a running sequence; raises InvariantError if it has none."""
    if sequence.slot is None:
        raise InvariantError(f"sequence {sequence.sequence_id} has no slot")
    return sequence.slot
