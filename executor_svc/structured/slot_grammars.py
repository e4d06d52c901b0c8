"""Grammars of the slots: their masks are made by threads while the model runs, and gathered when a step samples.

A sequence's mask follows from the token that it sampled last, so its thread begins as soon as that is known: while the
result is sent, the next plan read, and the model run. A row whose mask is not there yet gives no token (a beam: no
candidates) in that step, computes its last token again in the next one, and samples then, from the same logits with the
same noise: the token is the same, and no other row waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.plan.plan import AdmittedSequence, StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import SampledTokens
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.sampling.masks import RowMasks, Words, num_mask_words
from executor_svc.structured.compiler import Compiler
from executor_svc.structured.mask_threads import MaskThreads, MaskWork
from executor_svc.structured.matcher import GrammarState

_SHORT_OUTPUT = 64
"""Tokens that a state takes at once without holding up the masks of others."""

_POLL_S = 0.0005
"""Interval at which a step that waits for masks looks whether it has waited long enough."""

IsLate = Callable[[int], bool]
"""Says of a slot whether its row is late in this step: for a replay of what was recorded."""


@dataclass(slots=True)
class _Slot:
    """The grammar of one slot, and the work of a thread on it."""

    state: GrammarState
    work: MaskWork
    was_late: bool = False
    """Whether a step has waited for this work in vain."""


class SlotGrammars:
    """The grammars of all slots; for use by the device thread. It costs nothing while no slot has one."""

    def __init__(self, compiler: Compiler, num_slots: int, max_drafts: int) -> None:
        """max_drafts: of a sequence in one step."""
        self._compiler = compiler
        self._max_drafts = max_drafts
        self._slots: dict[int, _Slot] = {}
        self._has: BoolArray = np.zeros(num_slots, np.bool_)
        self._num_words = num_mask_words(compiler.source.vocab_size)
        self._threads = MaskThreads(num_slots, compiler.num_lexers)
        self.recorded: IsLate | None = None
        """Says which rows were late in a replayed step; None: a row without its mask is late."""
        self._last_s = 0.0
        """What the model took in the last step with grammars, in seconds."""
        self.num_late = 0
        """Rows that gave no token so far because their masks were late."""

    def clear(self) -> None:
        """Forget all sequences: every slot is free."""
        for slot in list(self._slots):
            self._release(slot)

    def follow(self, plan: StepPlan, slots: Slots) -> None:
        """Take over the changes of a plan that the slots have applied."""
        if self._slots:
            for slot in plan.released_slots:
                self._release(slot)
        for sequence in plan.admitted:
            self._admit(sequence, slots)
        if self._slots and len(plan.given_slots):
            given = zip(plan.given_slots, plan.given_token_ids, strict=True)
            self._take({slot: [token_id] for slot, token_id in given if self._has[slot]})

    def _release(self, slot: int) -> None:
        held = self._slots.pop(slot, None)
        if held is not None:
            held.state.is_abandoned = True
            self._has[slot] = False

    def _admit(self, sequence: AdmittedSequence, slots: Slots) -> None:
        slot, spec, num_tokens = sequence.slot, sequence.grammar, len(sequence.token_ids)
        if sequence.source is not None:
            source = self._slots.get(sequence.source.slot)
            spec = None if source is None else source.state.spec
            num_tokens += sequence.source.num_tokens
        if spec is None:
            return
        state = GrammarState(spec, self._compiler, self._max_drafts)
        output: list[int] = slots.token_ids[slot, sequence.num_prompt_tokens : num_tokens].tolist()
        if (parent := self._parent(spec, output)) is not None:
            compiled, work, num_left = None, state.begin_from(parent, output), len(output) - len(parent.tokens)
        else:
            compiled = self._compiler.request(spec, sequence.grammar_turn, lambda: not state.is_abandoned)
            work, num_left = lambda: state.begin(output, compiled), len(output)
        is_slow = num_left > _SHORT_OUTPUT
        self._slots[slot] = _Slot(state, self._threads.run(state, work, is_slow=is_slow, after=compiled))
        self._has[slot] = True

    def _parent(self, spec: GrammarSpec, output: list[int]) -> GrammarState | None:
        """Return the state whose tokens are the most of the first ones of an output, as a beam's are of its child's."""
        found: GrammarState | None = None
        for held in self._slots.values() if output else ():
            state = held.state
            known = len(state.tokens)
            is_free = held.work.done() and not state.error and state.spec == spec
            if is_free and (found is None or known > len(found.tokens)) and output[:known] == state.tokens:
                found = state
        return found

    def ready_state(self, slot: int) -> GrammarState | None:
        """Return the state of a slot with a grammar; None while a thread works on it."""
        held = self._slots[slot]
        if self.recorded is not None:
            held.work.result()
        return held.state if held.work.done() else None

    def have(self, slots: IntArray) -> BoolArray:
        """Return [n]: whether each slot has a grammar."""
        return self._has[slots]

    def wait_for_drafts(self, slots: Slots, scheduled: Scheduled) -> None:
        """Wait for the forced tokens of slots that may have drafts, before these are made: to miss them costs a step.

        Not if one of the step's slots has no grammar.
        """
        if self.recorded is None and self._slots and self._has[scheduled.slots].all():
            drafting = scheduled.slots[slots.max_drafts[scheduled.slots] > 0]
            self._wait(drafting.tolist(), len(scheduled.slots), self._last_s)

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
            self._run(held, lambda state=held.state, drafts=drafts: state.look_ahead(drafts))  # type: ignore[misc]

    def are_ready(self, slots: IntArray) -> bool:
        """Whether no thread works for these slots any more, as far as they have grammars."""
        # The last one first: threads work in the order of the slots.
        return all(self._slots[slot].work.done() for slot in slots[self._has[slots]].tolist()[::-1])

    def wait_while(self, scheduled: Scheduled, is_running: Callable[[], bool]) -> None:
        """Wait for the step's masks while a device runs the model: that costs nobody anything."""
        for slot in scheduled.rows.slots.tolist()[::-1]:
            if self._has[slot]:
                work = self._slots[slot].work
                while not work.done() and is_running():
                    self._threads.relieve()
                    _wait_for(work, _POLL_S)

    def masks(
        self, scheduled: Scheduled, elapsed_ns: int, is_late: IsLate | None, out: Words | None = None
    ) -> RowMasks | None:
        """Return the masks of scheduled.rows [Q]; None if none has a grammar.

        elapsed_ns: of the step so far. is_late: which rows are late, for a replay. out: [Q or more, words], in whose
        first rows the bits are then.
        """
        rows = scheduled.rows
        if not self._slots or not (has := self._has[rows.slots]).any():
            return None
        self._last_s = elapsed_ns * 1e-9
        (with_grammar,) = has.nonzero()
        slots, all_have = list(dict.fromkeys(rows.slots[with_grammar].tolist())), bool(has.all())
        late_slots = self._late(slots, elapsed_ns, all_have, is_late)
        late, failed = np.isin(rows.slots, list(late_slots)), np.zeros(len(rows.slots), np.bool_)
        masked, bits = list[int](), list[Words]()
        present = with_grammar[~late[with_grammar]]
        for row, slot in zip(present.tolist(), rows.slots[present].tolist(), strict=True):
            state = self._slots[slot].state
            ahead = 0 if rows.ahead is None else int(rows.ahead[row])
            failed[row] = bool(state.error) or (state.is_constrained and ahead >= state.num_masks)
            if ahead < state.num_masks and not failed[row]:
                masked.append(row)
                bits.append(state.bits[ahead])
        if bits:
            stacked = np.stack(bits, out=None if out is None else out[: len(bits)])
        else:
            stacked = np.zeros((0, self._num_words), np.uint32)
        return RowMasks(np.array(masked, np.int64), stacked, late, failed)

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
        self._take({slot: token_ids for slot, token_ids in tokens.items() if not slots.stopped[slot]})

    def _take(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Let threads take the next tokens of each slot."""
        held = [self._slots[slot] for slot in tokens]
        for each in held:
            each.work.result()  # Its mask was there when it sampled, or gave candidates.
        taken = [(each.state, next) for each, next in zip(held, tokens.values(), strict=True)]
        for each, work in zip(held, self._threads.take_each(taken), strict=True):
            each.work, each.was_late = work, False

    def _run(self, held: _Slot, work: Callable[[], None]) -> None:
        held.work, held.was_late = self._threads.run(held.state, work), False

    def _late(self, slots: list[int], elapsed_ns: int, all_have: bool, is_late: IsLate | None) -> list[int]:
        """Return the slots whose masks are late even after the time that the step waits."""
        if is_late is not None:
            for slot in slots:
                self._slots[slot].work.result()
            return [slot for slot in slots if is_late(slot)]
        late = self._pending(slots)
        if late and all_have:
            late = self._wait(slots, len(slots), elapsed_ns * 1e-9)
        self.num_late += len(late)
        return late

    def _wait(self, slots: list[int], num_slots: int, elapsed_s: float) -> list[int]:
        """Wait for masks while that is cheaper than to compute their rows again; returns the slots that are late.

        Every one of the step's num_slots has a grammar (rows without one wait for nobody). To leave p of n out costs p
        times the step's time so far; to wait costs n - p the time waited. So the step waits until one equals the other,
        and never longer than it took: then it has paid at most twice what it would have with foresight (the ski rental
        rule of Karlin et al., Algorithmica 3, 1988). What a step has waited for in vain, the next ones do not wait for,
        unless they have nothing else.
        """
        began = time.monotonic()
        while late := self._pending(slots):
            num_others = num_slots - len(late)
            hoped = [slot for slot in late if not (num_others and self._slots[slot].was_late)]
            left = began + elapsed_s * min(1.0, len(hoped) / max(1, num_others)) - time.monotonic()
            if left <= 0:
                break
            self._threads.relieve()
            # The last one: threads work in the order of the slots. The more are done, the shorter is the wait.
            _wait_for(self._slots[hoped[-1]].work, min(left, _POLL_S))
        for slot in late:
            self._slots[slot].was_late = True
        return late

    def _pending(self, slots: list[int]) -> list[int]:
        return [slot for slot in slots if not self._slots[slot].work.done()]


def _wait_for(work: MaskWork, seconds: float) -> None:
    """Wait until a part of the work is done, for so long at most."""
    with suppress(TimeoutError):
        work.result(seconds)
