"""A suffix automaton of token sequences, built online, with the number of occurrences of every substring.

The automaton is the smallest one that recognises all substrings of the sequences added to it (Blumer et al., 1985, "The
smallest automaton recognizing the subwords of a text"; with several sequences, Mohri, Moreno and Weinstein, 2009,
"General suffix automaton construction algorithm"). A state stands for all substrings that end at the same places. Its
link is the state of the longest of its suffixes that ends at further places.

Costs: a new token is O(1) amortized, about one state and a half and as many edges. Everything is in arrays of int32:
see `num_bytes`. A state's first edge is in the arrays of the states; most states have no other. Further edges are found
with a hash table that grows by one bucket at a time (Litwin, 1980, "Linear hashing"), so that no token pays for a
larger table. Its hash is random, against token ids chosen to collide, and nothing else depends on it.

Tokens are added by machine code (`Extender`), which knows an automaton by its header. Arrays have room ahead of what is
used, since machine code cannot grow them.
"""

from __future__ import annotations

import secrets
import sys
from array import array
from collections.abc import Iterable
from typing import Protocol

ROOT = 0
"""The state of the empty sequence."""
NO_STATE = -1

# A state's followers are compared up to this number, the oldest: a state with more predicts little.
_MAX_COMPARED = 64
_FEW_BUCKETS = 8
EDGES_OF_BUCKET = 2
"""With more further edges than this for each bucket, one is added."""
_FEW_STATES, _FEW_EDGES = 32, 32
_MASK = (1 << 64) - 1


_STATE_ARRAYS = ("length", "link", "count", "token", "target", "ring")
_EDGE_ARRAYS = ("edge_state", "edge_token", "edge_target", "edge_next", "edge_chain")
_COUNTS = (
    *("num_states", "num_edges", "state_room", "edge_room", "edges_needed", "num_split", "low_mask", "multiplier"),
    *("max_counted", "found"),
)
HEADER_FIELDS = (*_COUNTS, *_STATE_ARRAYS, *_EDGE_ARRAYS, "buckets")
"""The int64 fields of a header: counts, then the addresses of the arrays."""
_AT = {name: index for index, name in enumerate(HEADER_FIELDS)}


class Extender(Protocol):
    """Adds tokens to automata, as `cpu.kernels.suffixes` does."""

    def extend(self, automaton: SuffixAutomaton, state: int, tokens: array[int]) -> int:
        """Add tokens (int32) to the sequence of a state, ROOT for a new one, and return its new state.

        The state of a sequence is that of the whole sequence, its longest substring.
        """
        ...


class SuffixAutomaton:
    """Recognises the substrings of its sequences; states are numbers from 0, the root.

    Sequences are added by an `Extender`, from the root; several may grow at the same time.
    """

    def __init__(self, max_counted: int = 32) -> None:
        """max_counted: a token counts as an occurrence of so many states at most, those of the longest substrings."""
        self._header = array("q", [0] * len(HEADER_FIELDS))
        self.length = array("i")
        """[states] length of the longest substring of a state."""
        self.link = array("i")
        """[states] the state of the longest suffix that is in another state."""
        self.count = array("i")
        """[states] number of occurrences; exact for substrings with fewer than max_counted states of longer ones."""
        # The first edge of a state (token -1: it has none); the last of its further edges, a ring (0: it has none).
        self.token, self.target, self.ring = array("i"), array("i"), array("i")
        # Further edges, from 1: (state, token) -> target, the next of the state's ring, the next of the hash bucket.
        self.edge_state, self.edge_token, self.edge_target = array("i"), array("i"), array("i")
        self.edge_next, self.edge_chain = array("i"), array("i")
        self.buckets = array("i")
        self._multiplier = secrets.randbits(64) | 1
        signed = self._multiplier - (1 << 64) if self._multiplier >> 63 else self._multiplier
        for name, value in (
            ("num_states", 1), ("num_edges", 1), ("low_mask", _FEW_BUCKETS - 1), ("multiplier", signed),
            ("max_counted", max_counted),
        ):  # fmt: skip
            self._header[_AT[name]] = value
        self.grow()
        self.link[ROOT] = self.token[ROOT] = NO_STATE

    @property
    def address(self) -> int:
        """Of the header; it stays for the life of the automaton."""
        return self._header.buffer_info()[0]

    @property
    def num_states(self) -> int:
        """The root included."""
        return self._header[_AT["num_states"]]

    def grow(self) -> None:
        """Make room for the tokens that follow, those included that an `Extender` found no room for."""
        header = self._header
        states, edges = header[_AT["num_states"]], header[_AT["num_edges"]]
        self._lengthen(_STATE_ARRAYS, states + 2 + max(states // 8, _FEW_STATES), "state_room")
        needed = edges + header[_AT["edges_needed"]] + 1
        self._lengthen(_EDGE_ARRAYS, needed + max(edges // 8, _FEW_EDGES), "edge_room")
        self._lengthen(("buckets",), header[_AT["edge_room"]] // EDGES_OF_BUCKET + _FEW_BUCKETS + 1, None)

    def _lengthen(self, names: Iterable[str], size: int, room: str | None) -> None:
        """Make arrays at least so long; room: the field of their length."""
        for name in names:
            values: array[int] = getattr(self, name)
            if len(values) < size:
                values.frombytes(bytes(4 * (size - len(values))))
            self._header[_AT[name]] = values.buffer_info()[0]
            if room is not None:
                self._header[_AT[room]] = len(values)

    @property
    def num_bytes(self) -> int:
        """The bytes that the arrays hold, with the room that they have reserved."""
        return sum(sys.getsizeof(getattr(self, name)) for name in (*_STATE_ARRAYS, *_EDGE_ARRAYS, "buckets"))

    def follow(self, state: int, token: int) -> int:
        """Return the state after a further token, or NO_STATE."""
        if self.token[state] == token:
            return self.target[state]
        if self.ring[state]:
            edge = self._find(state, token)
            if edge:
                return self.edge_target[edge]
        return NO_STATE

    def _find(self, state: int, token: int) -> int:
        """Return the further edge of a state with this token; 0: there is none."""
        mixed = ((state << 20 ^ token) * self._multiplier & _MASK) >> 32
        low_mask = self._header[_AT["low_mask"]]
        bucket = mixed & low_mask
        if bucket < self._header[_AT["num_split"]]:
            bucket = mixed & (2 * low_mask + 1)
        edge = self.buckets[bucket]
        states, tokens = self.edge_state, self.edge_token
        while edge and (states[edge] != state or tokens[edge] != token):
            edge = self.edge_chain[edge]
        return edge

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
        while state > ROOT and self.token[state] < 0:
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
        token, following = self.token[state], self.target[state]
        last = edge = self.ring[state]
        if not edge:
            return token, following, 1.0
        count, targets, ring = self.count, self.edge_target, self.edge_next
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
            token, following = self.edge_token[best], targets[best]
        return token, following, highest / total
