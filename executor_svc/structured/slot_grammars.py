"""Grammars of the slots: their masks are made by threads while the model runs, and gathered when a step samples.

A sequence's mask follows from the token that it sampled last, so its thread begins as soon as that is known: while the
result is sent, the next plan read, and the model run. A row whose mask is not there yet gives no token in that step,
computes its last token again in the next one, and samples then, from the same logits with the same noise: the token is
the same, and no other row waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from cadenza.grammar.compiling import STACK_BYTES
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import SampledTokens
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.plan.plan import AdmittedSequence, StepPlan
from executor_svc.sampling.masks import RowMasks, Words, num_mask_words
from executor_svc.structured.matcher import Compiler, GrammarState

_MIXED_SHARE = 0.01
"""What a step waits for late masks, as a share of its time so far, while rows that have theirs could go on."""
_ALONE_SHARE = 0.5
"""The same where all rows have grammars: a row that is left out costs it a whole step."""
_ALONE_S = 0.05
"""What a step waits at most while no row could sample: plans behind it may have others."""

IsLate = Callable[[int], bool]
"""Says of a slot whether its row is late in this step: for a replay of what was recorded."""


@dataclass(slots=True)
class _Slot:
    """The grammar of one slot, and the work of a thread on it."""

    state: GrammarState
    work: Future[None]


class SlotGrammars:
    """The grammars of all slots; for use by the device thread. It costs nothing while no slot has one."""

    def __init__(self, compiler: Compiler, num_slots: int, max_drafts: int, num_threads: int = 1) -> None:
        """max_drafts: of a sequence in one step. num_threads: that make masks."""
        self._compiler = compiler
        self._max_drafts = max_drafts
        self._slots: dict[int, _Slot] = {}
        self._has: BoolArray = np.zeros(num_slots, np.bool_)
        self._num_words = num_mask_words(compiler.source.vocab_size)
        self._pool = _pool(num_threads)
        self.recorded: IsLate | None = None
        """Which rows were late in the step that is replayed; None: those whose masks are not there."""
        self.num_late = 0
        """Rows that gave no token so far because their masks were late."""

    def clear(self) -> None:
        """Forget all sequences: every slot is free."""
        self._slots.clear()
        self._has[:] = False

    def follow(self, plan: StepPlan, slots: Slots) -> None:
        """Take over the changes of a plan that the slots have applied."""
        if self._slots and len(plan.released_slots):
            self._has[plan.released_slots] = False
            for slot in plan.released_slots.tolist():
                self._slots.pop(slot, None)
        for sequence in plan.admitted:
            self._admit(sequence, slots)
        if self._slots and len(plan.given.slots):
            for slot, token_id in zip(plan.given.slots.tolist(), plan.given.values.tolist(), strict=True):
                if self._has[slot]:
                    self._take(slot, [token_id])

    def _admit(self, sequence: AdmittedSequence, slots: Slots) -> None:
        slot, spec, num_tokens = sequence.slot, sequence.grammar, len(sequence.token_ids)
        if sequence.source is not None:
            source = self._slots.get(sequence.source.slot)
            spec = None if source is None else source.state.spec
            num_tokens += sequence.source.num_tokens
        if spec is None:
            return
        state = GrammarState(spec, self._compiler.source, self._max_drafts)
        output = slots.token_ids[slot, sequence.num_prompt_tokens : num_tokens].tolist()
        self._slots[slot] = _Slot(state, self._pool.submit(state.begin, self._compiler, output))
        self._has[slot] = True

    def ready_state(self, slot: int) -> GrammarState | None:
        """Return the state of a slot with a grammar; None while a thread works on it."""
        held = self._slots[slot]
        if self.recorded is not None:
            held.work.result()
        return held.state if held.work.done() else None

    def have(self, slots: IntArray) -> BoolArray:
        """Return [n]: whether each slot has a grammar."""
        return self._has[slots]

    def look_ahead(self, slots: Slots, scheduled: Scheduled) -> None:
        """Let threads make the masks behind a step's drafts, which are in the slots."""
        if scheduled.num_drafts is None or not self._slots:
            return
        (drafted,) = ((scheduled.num_drafts > 0) & self._has[scheduled.slots]).nonzero()
        for index in drafted.tolist():
            slot, count = int(scheduled.slots[index]), int(scheduled.num_drafts[index])
            known = int(slots.num_tokens[slot])
            held = self._slots[slot]
            held.work.result()  # It was done when the drafts were made.
            drafts = slots.token_ids[slot, known : known + count].tolist()
            held.work = self._pool.submit(held.state.look_ahead, drafts)

    def masks(self, scheduled: Scheduled, elapsed_ns: int) -> RowMasks | None:
        """Return the masks of scheduled.rows [Q]; None if none has a grammar. elapsed_ns: of the step so far."""
        rows = scheduled.rows
        if not self._slots or not (has := self._has[rows.slots]).any():
            return None
        (with_grammar,) = has.nonzero()
        slots = np.unique(rows.slots[with_grammar])
        candidates = set(rows.slots[rows.candidates].tolist())
        late_slots = self._wait(slots.tolist(), candidates, elapsed_ns, all_have=bool(has.all()))
        late, failed = np.isin(rows.slots, list(late_slots)), np.zeros(len(rows.slots), np.bool_)
        masked, bits = list[int](), list[Words]()
        for row in with_grammar[~late[with_grammar]].tolist():
            state = self._slots[int(rows.slots[row])].state
            ahead = 0 if rows.ahead is None else int(rows.ahead[row])
            failed[row] = bool(state.error) or (state.is_constrained and ahead >= state.num_masks)
            if ahead < state.num_masks:
                masked.append(row)
                bits.append(state.bits[ahead])
        return RowMasks(
            np.array(masked, np.int64),
            np.stack(bits) if bits else np.zeros((0, self._num_words), np.uint32),
            late,
            failed,
        )

    def committed(self, slots: Slots, scheduled: Scheduled, sampled: SampledTokens) -> None:
        """Let threads take the tokens of a step that is committed."""
        if not self._slots:
            return
        rows = scheduled.rows
        taken = scheduled.takes_token(sampled.valid) & self._has[rows.slots]
        if not taken.any():
            return
        tokens: dict[int, list[int]] = {}
        for slot, token_id in zip(rows.slots[taken].tolist(), sampled.token_ids[taken].tolist(), strict=True):
            tokens.setdefault(slot, []).append(token_id)
        for slot, token_ids in tokens.items():
            if not slots.stopped[slot]:
                self._take(slot, token_ids)

    def _take(self, slot: int, token_ids: list[int]) -> None:
        held = self._slots[slot]
        held.work.result()  # Its mask was there when it sampled; a beam waits for its own.
        held.work = self._pool.submit(held.state.take, token_ids)

    def _wait(self, slots: list[int], candidates: set[int], elapsed_ns: int, *, all_have: bool) -> set[int]:
        """Return the slots whose masks are late, after the time that a step may wait for them."""
        if self.recorded is not None:
            late = {slot for slot in slots if self.recorded(slot)}
            wait([self._slots[slot].work for slot in slots])
            return late
        for slot in candidates.intersection(slots):
            # A beam search goes on with all of its beams, or not at all.
            self._slots[slot].work.result()
        pending = [slot for slot in slots if not self._slots[slot].work.done()]
        if pending:
            work = [self._slots[slot].work for slot in pending]
            wait(work, timeout=elapsed_ns * 1e-9 * (_ALONE_SHARE if all_have else _MIXED_SHARE))
            if all_have and len(pending) == len(slots) and not any(each.done() for each in work):
                wait(work, timeout=_ALONE_S, return_when=FIRST_COMPLETED)
        late = {slot for slot in pending if not self._slots[slot].work.done()}
        self.num_late += len(late)
        return late


def _pool(num_threads: int) -> ThreadPoolExecutor:
    """Return threads whose stacks hold what the scheduler's door has compiled on a smaller one."""
    pool, all_there = ThreadPoolExecutor(num_threads, thread_name_prefix="grammars"), threading.Barrier(num_threads)
    former = threading.stack_size(16 * STACK_BYTES)
    try:
        for _ in range(num_threads):
            pool.submit(all_there.wait)
    finally:
        threading.stack_size(former)
    return pool
