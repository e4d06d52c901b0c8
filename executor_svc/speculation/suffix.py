"""Drafts by frequency: what mostly followed the last tokens, in the same text and in those of other sequences.

SuffixDecoding (Oliaro et al., arXiv 2411.04975), with suffix automata in place of suffix trees: matches have no
greatest length, and a token costs O(1), not O(depth).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.limits import Limits
from executor_svc.speculation.drafts import Drafts, tokens_to_index
from executor_svc.speculation.shared_automata import SharedAutomata, SharedSequence
from executor_svc.speculation.suffix_automaton import ROOT, SuffixAutomaton

# While a text is not wholly indexed, so many of its last tokens are matched anew in each step.
_MATCHED = 16


class _SequenceText:
    """The automaton of a sequence's own text, and its place in the shared ones."""

    __slots__ = ("num_indexed", "num_shared", "own", "shared", "state")

    def __init__(self, shared: SharedSequence | None) -> None:
        self.own = SuffixAutomaton()
        self.state = ROOT
        self.shared = shared
        self.num_indexed = 0
        self.num_shared = -1
        """The tokens that the shared automaton has, the prompt's included; -1: it is not known yet."""


class _Text(NamedTuple):
    """A sequence in a step."""

    sequence: _SequenceText
    slot: int
    num_tokens: int


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

    Costs: O(1) amortized for a new token in each of the two automata, and O(1) for a draft, with 64 followers compared
    at most. A step indexes a few tokens of every slot and max_indexed further ones in all; a longer prompt takes
    several steps, in which its last tokens are matched in its first part. Memory: the shared automata are bounded by
    max_bytes; see `SuffixAutomaton` for those of the sequences.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        max_bytes: int = 64 << 20,
        min_match: int = 2,
        factor: float = 3.0,
        min_probability: float = 0.1,
        max_indexed: int = 512,
    ) -> None:
        """max_bytes: of the shared automata; 0: nothing is shared. min_match: the shortest match with drafts.

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
        self._max_indexed = max_indexed
        self._always = limits.max_drafts + 1
        self._sequences: list[_SequenceText | None] = [None] * limits.num_slots
        self._shared = SharedAutomata(max_bytes) if max_bytes else None

    def follow(self, plan: StepPlan) -> None:
        """As in `DraftSource`."""

    def admitted(self, slot: int, scope: int) -> None:
        """As in `DraftSource`."""
        shared = SharedSequence(self._shared, scope) if scope and self._shared is not None else None
        self._sequences[slot] = _SequenceText(shared)

    def released(self, slots: IntArray) -> None:
        """As in `DraftSource`."""
        for slot in slots.tolist():
            self._sequences[slot] = None

    def committed(self, slots: Slots, scheduled: Scheduled, starts: IntArray) -> None:
        """As in `DraftSource`."""

    def clear(self) -> None:
        """As in `DraftSource`."""
        self._sequences = [None] * len(self._sequences)
        self._shared = SharedAutomata(self._max_bytes) if self._max_bytes else None

    def looks(self, slots: Slots, rows: IntArray) -> bool:
        """As in `DraftSource`: indexes, and compares the longest matches with min_match."""
        known = [text for text in self._texts(slots, rows) if text is not None]
        if known:
            self._index(slots, known)
            if self._shared is not None:
                self._shared.check()
        return any(map(self._has_match, known))

    def propose(self, slots: Slots, rows: IntArray, most: IntArray) -> Drafts:
        """As in `DraftSource`; a slot whose admission was not reported gets no drafts."""
        counts, drafts = [0] * len(rows), list[int]()
        for i, (text, limit) in enumerate(zip(self._texts(slots, rows), most.tolist(), strict=True)):
            if text is not None and limit:
                behind = text.sequence.num_indexed < text.num_tokens
                found = self._drafts(text.sequence, self._last_tokens(slots, text) if behind else None, limit)
                counts[i] = len(found)
                drafts += found
        return Drafts(np.array(counts, np.int64), np.array(drafts, np.int64))

    def _texts(self, slots: Slots, rows: IntArray) -> list[_Text | None]:
        """Return the texts of these slots; None: its admission was not reported."""
        # In Python's own numbers: there are few rows, and each call of numpy takes as long as a row's tokens.
        texts = list[_Text | None]()
        for slot, num_tokens in zip(rows.tolist(), slots.num_tokens[rows].tolist(), strict=True):
            sequence = self._sequences[slot]
            texts.append(None if sequence is None else _Text(sequence, slot, num_tokens))
        return texts

    def _has_match(self, text: _Text) -> bool:
        sequence, least = text.sequence, self._min_match
        own = sequence.own
        if sequence.num_indexed < text.num_tokens or own.length[max(own.link[sequence.state], ROOT)] >= least:
            return True
        if sequence.shared is None:
            return False
        return any(found.length[found.continued(state)] >= least for found, state, _ in sequence.shared.matches())

    def _index(self, slots: Slots, texts: Sequence[_Text]) -> None:
        """Add the new tokens of these texts to the automata, own and shared."""
        for (sequence, slot, _), taken in zip(
            texts, self._taken([text.num_tokens - text.sequence.num_indexed for text in texts]), strict=True
        ):
            start, state, extend = sequence.num_indexed, sequence.state, sequence.own.extend
            for token in slots.token_ids[slot, start : start + taken].tolist():
                state = extend(state, token)
            sequence.state, sequence.num_indexed = state, start + taken
        sharing = [text for text in texts if text.sequence.shared is not None]
        for sequence, slot, num_tokens in sharing:
            if sequence.num_shared < 0:
                sequence.num_shared = min(int(slots.num_prompt_tokens[slot]), num_tokens)
        waiting = [text.num_tokens - text.sequence.num_shared for text in sharing]
        for (sequence, slot, _), taken in zip(sharing, self._taken(waiting), strict=True):
            start, known = sequence.num_shared, slots.token_ids[slot]
            if sequence.shared is not None:
                sequence.shared.extend(known, start, known[start : start + taken].tolist())
            sequence.num_shared = start + taken

    def _taken(self, waiting: list[int]) -> list[int]:
        """Return how many of the waiting tokens of each text are indexed now."""
        if max(waiting, default=0) <= self._always:
            return waiting
        taken: list[int] = tokens_to_index(np.array(waiting, np.int64), self._always, self._max_indexed).tolist()
        return taken

    def _drafts(self, sequence: _SequenceText, last_tokens: list[int] | None, most: int) -> list[int]:
        """Return the drafts of a sequence; last_tokens: of a text that is not wholly indexed."""
        own = sequence.own
        if last_tokens is None:
            # The text itself ends here only; its link is its longest suffix that was there before.
            state = max(own.link[sequence.state], ROOT)
            matches = [(own, state, own.length[state])]
        else:
            matches = [(own, *own.match(last_tokens))]
        if sequence.shared is not None:
            matches += sequence.shared.matches()
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

    def _last_tokens(self, slots: Slots, text: _Text) -> list[int]:
        end = text.num_tokens
        tokens: list[int] = slots.token_ids[text.slot, max(end - _MATCHED, 0) : end].tolist()
        return tokens
