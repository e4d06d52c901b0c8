"""Drafts by frequency: what mostly followed the last tokens, in the same text and in those of other sequences.

SuffixDecoding (Oliaro et al., arXiv 2411.04975), with suffix automata in place of suffix trees: matches have no
greatest length, and a token costs O(1), not O(depth).
"""

from __future__ import annotations

import numpy as np

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.limits import Limits
from executor_svc.speculation.drafts import Drafts
from executor_svc.speculation.shared_automata import Scope, SharedAutomata
from executor_svc.speculation.suffix_automaton import ROOT, SuffixAutomaton
from executor_svc.speculation.suffix_texts import (
    CONTEXT,
    NUM_INDEXED,
    NUM_SHARED,
    OLDER,
    OLDER_LENGTH,
    OLDER_STATE,
    OWN,
    OWN_ROOM,
    SHARED,
    SHARED_STATE,
    STATE,
    SuffixCode,
    SuffixTexts,
)

# While a text is not wholly indexed, so many of its last tokens are matched anew in each step.
_MATCHED = 16


class SuffixSource:
    """Implements `DraftSource`.

    The longest suffix of a text that was there before is its match: in its own prompt and output, and in the outputs of
    the sequences of its scope. The drafts are the most frequent token after the match, then the most frequent one after
    that, and so on; at the end of a text they go on from its longest suffix with followers. They end where the product
    of the tokens' shares of the occurrences falls under min_probability, and at factor tokens for each token of the
    match (the paper's alpha): a short match is often chance. Of several automata's drafts those with the largest sum of
    these products are taken, the expected number of accepted ones; of equal ones those of the longer match, then the
    text's own.

    Outputs enter the shared automaton as they grow: sequences that run at the same time, as the samples of one prompt,
    profit from each other, no step pays for a whole output, and a sequence that is preempted has lost nothing. Scope 0
    shares with nobody. `clear` drops the shared automata too: another scheduler may give its numbers to others.

    Costs: O(1) amortized for a new token in each of the two automata, which machine code adds for all texts in one
    call, and O(1) for a draft, with 64 followers compared at most. A step indexes a few tokens of every slot and
    max_indexed further ones in all; a longer prompt takes several steps, in which its last tokens are matched in its
    first part. Memory: the shared automata are bounded by max_bytes; see `SuffixAutomaton` for those of the sequences.
    """

    def __init__(
        self,
        limits: Limits,
        code: SuffixCode,
        *,
        max_bytes: int = 64 << 20,
        min_match: int = 2,
        factor: float = 3.0,
        min_probability: float = 0.1,
        max_indexed: int = 4096,
    ) -> None:
        """code: adds tokens to automata. max_bytes: of the shared automata; 0: nothing is shared. min_match: the
        shortest match with drafts.

        min_probability has the value of the paper's code, where factor is 1: with 3 a short copy is drafted whole, and
        the number of drafts of a step is limited by what pays. Raises ValueError for values out of range.
        """
        if min_match < 1 or factor <= 0 or not 0 <= min_probability <= 1:
            raise ValueError(
                f"min_match {min_match}, factor {factor} or min_probability {min_probability} out of range"
            )
        self._max_bytes = max_bytes
        self._min_match = min_match
        self._factor = factor
        self._min_probability = min_probability
        self._texts = SuffixTexts(
            code, limits.num_slots, always=limits.max_drafts + 1, max_indexed=max_indexed, min_match=min_match
        )
        self._own: list[SuffixAutomaton | None] = [None] * limits.num_slots
        self._scopes: list[Scope | None] = [None] * limits.num_slots
        self._number_of: dict[int, int] = {}
        """The scopes' numbers of the slots that share."""
        self._detached: dict[int, None] = {}
        """The slots among these that have no automaton now."""
        self._shared = SharedAutomata(max_bytes) if max_bytes else None

    def follow(self, plan: StepPlan) -> None:
        """As in `DraftSource`."""

    def admitted(self, slot: int, scope: int) -> None:
        """As in `DraftSource`."""
        own = self._own[slot] = SuffixAutomaton()
        self._leave(slot)
        text = self._texts.table[slot]
        text[:] = 0
        text[OWN], text[NUM_SHARED] = own.address, -1
        if scope and self._shared is not None:
            self._number_of[slot] = scope
            self._detached[slot] = None

    def released(self, slots: IntArray) -> None:
        """As in `DraftSource`."""
        self._texts.table[slots] = 0
        for slot in slots.tolist():
            self._own[slot] = None
            self._leave(slot)

    def committed(self, slots: Slots, scheduled: Scheduled, starts: IntArray) -> None:
        """As in `DraftSource`."""

    def clear(self) -> None:
        """As in `DraftSource`."""
        self.released(np.arange(len(self._own)))
        self._shared = SharedAutomata(self._max_bytes) if self._max_bytes else None

    def looks(self, slots: Slots, rows: IntArray) -> bool:
        """As in `DraftSource`: indexes, and compares the longest matches with min_match."""
        if self._detached:
            self._attach([slot for slot in rows.tolist() if slot in self._detached])
        self._texts.begin(slots, rows)
        while True:
            outcome, slot = self._texts.grow()
            if not outcome:
                return self._texts.num_matching > 0
            if outcome == OWN_ROOM:
                own = self._own[slot]
                assert own is not None
                own.grow()
            else:
                assert self._shared is not None
                self._shared.use(self._number_of[slot]).recent.grow()
                self._detach(self._shared.check(self._number_of[slot]))
                self._attach([slot] if slot in self._detached else [])

    def propose(self, slots: Slots, rows: IntArray, most: IntArray) -> Drafts:
        """As in `DraftSource`; a slot whose admission was not reported gets no drafts."""
        counts, drafts = [0] * len(rows), list[int]()
        known = slots.num_tokens[rows].tolist()
        for i, (slot, num_tokens, limit) in enumerate(zip(rows.tolist(), known, most.tolist(), strict=True)):
            own = self._own[slot]
            if own is not None and limit:
                found = self._drafts(slots, slot, own, num_tokens, limit)
                counts[i] = len(found)
                drafts += found
        return Drafts(np.array(counts, np.int64), np.array(drafts, np.int64))

    def _leave(self, slot: int) -> None:
        """Take a slot out of its scope."""
        self._scopes[slot] = None
        self._number_of.pop(slot, None)
        self._detached.pop(slot, None)

    def _detach(self, numbers: list[int]) -> None:
        """Take the slots of scopes whose automata have changed out of these."""
        for slot, number in self._number_of.items() if numbers else ():
            if number in numbers and self._scopes[slot] is not None:
                text = self._texts.table[slot]
                text[[SHARED, OLDER]] = 0
                self._scopes[slot] = None
                self._detached[slot] = None

    def _attach(self, slots: list[int]) -> None:
        """Put slots into the automata of their scopes, as texts that begin with the last tokens before their next."""
        if self._shared is None:
            return
        for slot in slots:
            number = self._number_of[slot]
            scope = self._shared.use(number)
            self._detach(self._shared.check(number))
            text = self._texts.table[slot]
            text[[SHARED, SHARED_STATE]] = scope.recent.address, ROOT
            text[[OLDER, OLDER_STATE, OLDER_LENGTH]] = 0 if scope.older is None else scope.older.address, ROOT, 0
            if text[NUM_SHARED] >= 0:
                text[NUM_SHARED] = max(text[NUM_SHARED] - CONTEXT, 0)
            self._scopes[slot] = scope
            del self._detached[slot]

    def _drafts(self, slots: Slots, slot: int, own: SuffixAutomaton, num_tokens: int, most: int) -> list[int]:
        """Return the drafts of a slot."""
        text = self._texts.table[slot].tolist()
        if text[NUM_INDEXED] < num_tokens:
            last_tokens = slots.token_ids[slot, max(num_tokens - _MATCHED, 0) : num_tokens].tolist()
            matches = [(own, *own.match(last_tokens))]
        else:
            # The text itself ends here only; its link is its longest suffix that was there before.
            state = max(own.link[text[STATE]], ROOT)
            matches = [(own, state, own.length[state])]
        scope = self._scopes[slot]
        if scope is not None:
            matches.append((scope.recent, text[SHARED_STATE], scope.recent.length[text[SHARED_STATE]]))
            if scope.older is not None:
                matches.append((scope.older, text[OLDER_STATE], text[OLDER_LENGTH]))
        best: tuple[float, int] = (0.0, 0)
        drafts: list[int] = []
        for automaton, state, length in matches:
            if length < self._min_match:
                continue
            score, length, tokens = self._continue(automaton, state, length, most)
            if (score, length) > best:
                best, drafts = (score, length), tokens
        return drafts

    def _continue(self, automaton: SuffixAutomaton, state: int, length: int, most: int) -> tuple[float, int, list[int]]:
        """Return (sum of the drafts' probabilities, length of the match, drafts) for a match in an automaton."""
        tokens: list[int] = []
        score, probability = 0.0, 1.0
        while length >= self._min_match and len(tokens) < most:
            token, following, share = automaton.best(state)
            if token < 0:
                # A sequence ends here.
                state = automaton.link[state]
                length = automaton.length[state]
                continue
            if not tokens:
                match, most = length, min(most, int(length * self._factor))
                if not most:
                    break
            probability *= share
            if probability < self._min_probability:
                break
            score += probability
            tokens.append(token)
            state, length = following, length + 1
        return score, match if tokens else 0, tokens
