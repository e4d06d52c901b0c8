"""A suffix automaton of token sequences, built online, with the number of occurrences of every substring.

The automaton is the smallest one that recognises all substrings of the sequences added to it (Blumer et al., 1985, "The
smallest automaton recognizing the subwords of a text"; with several sequences, Mohri, Moreno and Weinstein, 2009,
"General suffix automaton construction algorithm"). A state stands for all substrings that end at the same places. Its
link is the state of the longest of its suffixes that ends at further places.

Costs: a new token is O(1) amortized, about one state and a half and as many edges. Everything is in arrays of int32:
see `num_bytes`. A state's first edge is in the arrays of the states; most states have no other. Further edges are found
with a hash table that grows by one bucket at a time (Litwin, 1980, "Linear hashing"), so that no token pays for a
larger table. Its hash is random, against token ids chosen to collide, and nothing else depends on it.
"""

from __future__ import annotations

import secrets
import sys
from array import array
from collections.abc import Iterable

ROOT = 0
"""The state of the empty sequence."""
NO_STATE = -1

# A state's followers are compared up to this number, the oldest: a state with more predicts little.
_MAX_COMPARED = 64
_FEW_BUCKETS = 8
_EDGES_OF_BUCKET = 2
_MASK = (1 << 64) - 1


def _ints(*values: int) -> array[int]:
    return array("i", values)


class SuffixAutomaton:
    """Recognises the substrings of its sequences; states are numbers from 0, the root.

    A sequence is added by `extend`, one token after the other, from the root; several may grow at the same time.
    """

    def __init__(self, max_counted: int = 32) -> None:
        """max_counted: a token counts as an occurrence of so many states at most, those of the longest substrings."""
        self.length = _ints(0)
        """[states] length of the longest substring of a state."""
        self.link = _ints(NO_STATE)
        """[states] the state of the longest suffix that is in another state."""
        self.count = _ints(0)
        """[states] number of occurrences; exact for substrings with fewer than max_counted states of longer ones."""
        self._max_counted = max_counted
        # The first edge of a state; the last of its further edges, which form a ring (0: it has none).
        self._token = _ints(-1)
        self._target = _ints(0)
        self._ring = _ints(0)
        # Further edges, from 1: (state, token) -> target, the next of the state's ring, the next of the hash bucket.
        self._edge_state = _ints(0)
        self._edge_token = _ints(0)
        self._edge_target = _ints(0)
        self._edge_next = _ints(0)
        self._edge_chain = _ints(0)
        self._buckets = _ints(*([0] * _FEW_BUCKETS))
        self._low_mask = _FEW_BUCKETS - 1
        self._num_split = 0
        self._multiplier = secrets.randbits(64) | 1

    @property
    def num_bytes(self) -> int:
        """The bytes that the arrays hold, with the room that they have reserved."""
        states = (self.length, self.link, self.count, self._token, self._target, self._ring)
        edges = (self._edge_state, self._edge_token, self._edge_target, self._edge_next, self._edge_chain)
        return sum(map(sys.getsizeof, states)) + sum(map(sys.getsizeof, edges)) + sys.getsizeof(self._buckets)

    def follow(self, state: int, token: int) -> int:
        """Return the state after a further token, or NO_STATE."""
        if self._token[state] == token:
            return self._target[state]
        if self._ring[state]:
            edge = self._find(state, token)
            if edge:
                return self._edge_target[edge]
        return NO_STATE

    def extend(self, last: int, token: int) -> int:
        """Add a token to a sequence and return its new state; last: its state so far, ROOT for a new sequence.

        The state of a sequence is that of the whole sequence, its longest substring.
        """
        length, link, first, target, ring = self.length, self.link, self._token, self._target, self._ring
        state, new, found = last, NO_STATE, ROOT
        while state >= 0:
            if first[state] == token:
                found = target[state]
                break
            if ring[state] and (edge := self._find(state, token)):
                found = self._edge_target[edge]
                break
            if new < 0:
                new = self._add_state(length[last] + 1)
            if first[state] < 0:
                first[state], target[state] = token, new
            else:
                self._add_edge(state, token, new)
            state = link[state]
        if found != ROOT and length[found] != length[state] + 1:
            found = self._clone(found, state, token)
        if new < 0:
            new = found
        else:
            link[new] = found
        self._count(new)
        return new

    def _count(self, state: int) -> None:
        """Count an occurrence of a state, and of its suffixes."""
        count, link = self.count, self.link
        for _ in range(self._max_counted):
            count[state] += 1
            state = link[state]
            if state <= ROOT:
                break

    def _add_state(self, length: int) -> int:
        self.length.append(length)
        self.link.append(ROOT)
        self.count.append(0)
        self._token.append(-1)
        self._target.append(0)
        self._ring.append(0)
        return len(self.length) - 1

    def _clone(self, found: int, state: int, token: int) -> int:
        """Split a state: its substrings up to the length that `state` gives with the token move to a new one."""
        clone = self._add_state(self.length[state] + 1)
        self.link[clone] = self.link[found]
        self.count[clone] = self.count[found]
        self.link[found] = clone
        self._token[clone], self._target[clone] = self._token[found], self._target[found]
        last = edge = self._ring[found]
        while edge:
            edge = self._edge_next[edge]
            self._add_edge(clone, self._edge_token[edge], self._edge_target[edge])
            if edge == last:
                break
        while state >= 0:
            if self._token[state] == token:
                if self._target[state] != found:
                    break
                self._target[state] = clone
            else:
                edge = self._find(state, token)
                if self._edge_target[edge] != found:
                    break
                self._edge_target[edge] = clone
            state = self.link[state]
        return clone

    def _find(self, state: int, token: int) -> int:
        """Return the further edge of a state with this token; 0: there is none."""
        mixed = ((state << 20 ^ token) * self._multiplier & _MASK) >> 32
        bucket = mixed & self._low_mask
        if bucket < self._num_split:
            bucket = mixed & (2 * self._low_mask + 1)
        edge = self._buckets[bucket]
        states, tokens = self._edge_state, self._edge_token
        while edge and (states[edge] != state or tokens[edge] != token):
            edge = self._edge_chain[edge]
        return edge

    def _add_edge(self, state: int, token: int, target: int) -> None:
        """Add a further edge, the last in the state's ring."""
        edge = len(self._edge_state)
        last = self._ring[state]
        self._edge_state.append(state)
        self._edge_token.append(token)
        self._edge_target.append(target)
        if last:
            self._edge_next.append(self._edge_next[last])
            self._edge_next[last] = edge
        else:
            self._edge_next.append(edge)
        self._ring[state] = edge
        mixed = ((state << 20 ^ token) * self._multiplier & _MASK) >> 32
        bucket = mixed & self._low_mask
        if bucket < self._num_split:
            bucket = mixed & (2 * self._low_mask + 1)
        self._edge_chain.append(self._buckets[bucket])
        self._buckets[bucket] = edge
        if edge > _EDGES_OF_BUCKET * len(self._buckets):
            self._split_bucket()

    def _split_bucket(self) -> None:
        """Add a bucket: it takes its part of the edges of the bucket whose turn it is."""
        old, chain, buckets = self._num_split, self._edge_chain, self._buckets
        half = self._low_mask + 1
        edge, kept, moved = buckets[old], 0, 0
        while edge:
            following = chain[edge]
            mixed = ((self._edge_state[edge] << 20 ^ self._edge_token[edge]) * self._multiplier & _MASK) >> 32
            if mixed & half:
                chain[edge], moved = moved, edge
            else:
                chain[edge], kept = kept, edge
            edge = following
        buckets[old] = kept
        buckets.append(moved)
        self._num_split += 1
        if self._num_split == half:
            self._low_mask, self._num_split = 2 * half - 1, 0

    def walk(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return (state, length) of the longest suffix of a matched substring and a further token that matches.

        state and length: of the match so far. O(1) amortized over the tokens of a text.
        """
        while (following := self.follow(state, token)) < 0:
            state = self.link[state]
            if state < 0:
                return ROOT, 0
            length = self.length[state]
        return following, length + 1

    def continued(self, state: int) -> int:
        """Return the longest suffix of a state that has a follower; the root has none in an empty automaton."""
        while state > ROOT and self._token[state] < 0:
            state = self.link[state]
        return state

    def match(self, tokens: Iterable[int]) -> tuple[int, int]:
        """Return (state, length) of the longest suffix of these tokens that is a substring of a sequence."""
        state, length = ROOT, 0
        for token in tokens:
            state, length = self.walk(state, length, token)
        return state, length

    def best(self, state: int) -> tuple[int, int, float]:
        """Return (token, the state after it, its share of the occurrences) of the most frequent follower.

        Of several, the one whose edge was added last; of more than 64 followers, the oldest 64 are compared. Without a
        follower the token is -1.
        """
        token, following = self._token[state], self._target[state]
        last = edge = self._ring[state]
        if not edge:
            return token, following, 1.0
        count, targets, ring = self.count, self._edge_target, self._edge_next
        highest = total = count[following]
        best = 0
        for _ in range(_MAX_COMPARED):
            edge = ring[edge]
            times = count[targets[edge]]
            total += times
            if times >= highest:
                highest, best = times, edge
            if edge == last:
                break
        else:
            total = max(total, count[state])
        if best:
            token, following = self._edge_token[best], targets[best]
        return token, following, highest / total
