"""Adding tokens to a suffix automaton: `speculation.suffix_automaton` says what it is, and what its arrays hold.

The header of an automaton is int64 fields: counts, then the addresses of its arrays of int32.
"""

from __future__ import annotations

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import Emitter, Int
from executor_svc.cpu.kernels.suffixes.words import Array, Variable, Word, both, fields, repeat_while
from executor_svc.speculation.suffix_automaton import EDGES_OF_BUCKET, HEADER_FIELDS


class _Automaton:
    """The fields and arrays of an automaton at an address."""

    def __init__(self, emit: Emitter, header: Int) -> None:
        self.emit = emit
        own = dict(zip(HEADER_FIELDS, fields(emit, header, len(HEADER_FIELDS)), strict=True))
        self.num_states, self.num_edges = own["num_states"], own["num_edges"]
        self.state_room, self.edge_room, self.edges_needed = own["state_room"], own["edge_room"], own["edges_needed"]
        self.num_split, self.low_mask = own["num_split"], own["low_mask"]
        self.multiplier, self.max_counted, self.found = own["multiplier"], own["max_counted"], own["found"]
        self.length, self.link, self.count = (self._array(own[name]) for name in ("length", "link", "count"))
        self.token, self.target, self.ring = (self._array(own[name]) for name in ("token", "target", "ring"))
        self.edge_state, self.edge_token = self._array(own["edge_state"]), self._array(own["edge_token"])
        self.edge_target, self.edge_next = self._array(own["edge_target"]), self._array(own["edge_next"])
        self.edge_chain, self.buckets = self._array(own["edge_chain"]), self._array(own["buckets"])

    def _array(self, address: Word) -> Array:
        return Array(self.emit, address.value)

    def mixed(self, state: Int, token: Int) -> Int:
        """The hash of an edge."""
        build = self.emit.builder
        key = build.xor(build.shl(state.value, self.emit.integer(20).value), token.value)
        product = build.mul(key, self.multiplier.value.value)
        return Int(self.emit, build.lshr(product, self.emit.integer(32).value))

    def bucket(self, mixed: Int) -> Int:
        """The bucket of a hash, of those that are there."""
        build, mask = self.emit.builder, self.low_mask.value
        low = Int(self.emit, build.and_(mixed.value, mask.value))
        high = Int(self.emit, build.and_(mixed.value, (mask * 2 + 1).value))
        return high.where(low.less(self.num_split.value), low)


class AutomatonCode:
    """Adds the functions of automata to a code; each exists once."""

    def __init__(self, code: Code) -> None:
        self._find = code.helper("suffix_find", 3, _find)
        self._split = code.helper("suffix_split_bucket", 1, _split_bucket)
        self._add_edge = code.helper("suffix_add_edge", 4, self._emit_add_edge)
        self._clone = code.helper("suffix_clone", 4, self._emit_clone)
        self._needs = code.helper("suffix_needs", 3, self._emit_needs)
        self._extend = code.helper("suffix_extend", 3, self._emit_extend)
        self.add_tokens = code.helper("suffix_add_tokens", 4, self._emit_add_tokens)
        """(header, address of a text's int32 tokens, end, address of two fields: the text's state and its tokens that
        are added): adds tokens up to `end`, or to the first that there is no room for; then `edges_needed` says for how
        many edges there must be."""
        self.walk = code.helper("suffix_walk", 3, self._emit_walk)
        """(header, address of two fields: state and length of a match, token): `SuffixAutomaton.walk`."""

    def _emit_add_tokens(self, emit: Emitter, header: Int, text: Int, end: Int, place: Int) -> None:
        automaton, tokens = _Automaton(emit, header), Array(emit, text)
        state, number = fields(emit, place, 2)
        with repeat_while(emit, lambda: number.value.less(end)) as leave:
            token = tokens[number.value]
            self._needs(emit, header, state.value, token)
            fits = both(
                emit,
                (automaton.num_states.value + 1).less(automaton.state_room.value),
                (automaton.num_edges.value + automaton.edges_needed.value).less(automaton.edge_room.value),
            )
            with emit.builder.if_else(fits) as (then, otherwise):
                with then:
                    self._extend(emit, header, state.value, token)
                    state.set(automaton.found.value)
                    number.set(number.value + 1)
                with otherwise:
                    leave()

    def _emit_needs(self, emit: Emitter, header: Int, last: Int, token: Int) -> None:
        """Set edges_needed to the edges that a token adds at most."""
        automaton = _Automaton(emit, header)
        state, needed, found = Variable(emit, last), Variable(emit, 0), Variable(emit, -1)
        with repeat_while(emit, lambda: both(emit, emit.integer(-1).less(state.value), found.value.less(0))):
            self._follow(emit, automaton, header, state.value, token, found)
            with emit.builder.if_then(found.value.less(0)):
                needed.set(needed.value + 1)
                state.set(automaton.link[state.value])
        with emit.builder.if_then(emit.integer(0).less(found.value)):
            is_longer = (automaton.length[state.value] + 1).less(automaton.length[found.value])
            with emit.builder.if_then(is_longer):
                last_edge = automaton.ring[found.value]
                edge, going = Variable(emit, last_edge), Variable(emit, last_edge)
                with repeat_while(emit, lambda: emit.integer(0).less(going.value)):
                    edge.set(automaton.edge_next[edge.value])
                    needed.set(needed.value + 1)
                    going.set(emit.integer(0).where(edge.value.equals(last_edge), 1))
        automaton.edges_needed.set(needed.value)

    def _follow(
        self, emit: Emitter, automaton: _Automaton, header: Int, state: Int, token: Int, found: Variable
    ) -> None:
        """Set `found` to the state after a token, if there is one."""
        is_first = automaton.token[state].equals(token)
        with emit.builder.if_else(is_first) as (then, otherwise):
            with then:
                found.set(automaton.target[state])
            with otherwise, emit.builder.if_then(emit.integer(0).less(automaton.ring[state])):
                self._find(emit, header, state, token)
                edge = automaton.found.value
                with emit.builder.if_then(emit.integer(0).less(edge)):
                    found.set(automaton.edge_target[edge])

    def _emit_extend(self, emit: Emitter, header: Int, last: Int, token: Int) -> None:
        """Set `found` to the state of a text that a token is added to; there is room."""
        automaton = _Automaton(emit, header)
        state, new, found = Variable(emit, last), Variable(emit, -1), Variable(emit, -1)
        with repeat_while(emit, lambda: both(emit, emit.integer(-1).less(state.value), found.value.less(0))):
            self._follow(emit, automaton, header, state.value, token, found)
            with emit.builder.if_then(found.value.less(0)):
                with emit.builder.if_then(new.value.less(0)):
                    new.set(_new_state(automaton, automaton.length[last] + 1))
                with emit.builder.if_else(automaton.token[state.value].less(0)) as (then, otherwise):
                    with then:
                        automaton.token[state.value] = token
                        automaton.target[state.value] = new.value
                    with otherwise:
                        self._add_edge(emit, header, state.value, token, new.value)
                state.set(automaton.link[state.value])
        suffix = Variable(emit, found.value.most(0))
        with emit.builder.if_then(emit.integer(0).less(found.value)):
            is_longer = (automaton.length[state.value] + 1).less(automaton.length[found.value])
            with emit.builder.if_then(is_longer):
                self._clone(emit, header, found.value, state.value, token)
                suffix.set(automaton.found.value)
        with emit.builder.if_else(new.value.less(0)) as (then, otherwise):
            with then:
                new.set(suffix.value)
            with otherwise:
                automaton.link[new.value] = suffix.value
        _count(emit, automaton, new.value)
        automaton.found.set(new.value)

    def _emit_clone(self, emit: Emitter, header: Int, found: Int, before: Int, token: Int) -> None:
        """Split the state `found`: its substrings up to the length that `before` gives move to a new one."""
        automaton = _Automaton(emit, header)
        clone = _new_state(automaton, automaton.length[before] + 1)
        for array in (automaton.link, automaton.count, automaton.token, automaton.target):
            array[clone] = array[found]
        automaton.link[found] = clone
        last_edge = automaton.ring[found]
        edge, going = Variable(emit, last_edge), Variable(emit, last_edge)
        with repeat_while(emit, lambda: emit.integer(0).less(going.value)):
            edge.set(automaton.edge_next[edge.value])
            self._add_edge(emit, header, clone, automaton.edge_token[edge.value], automaton.edge_target[edge.value])
            going.set(emit.integer(0).where(edge.value.equals(last_edge), 1))
        state, moving = Variable(emit, before), Variable(emit, 1)
        with repeat_while(emit, lambda: both(emit, emit.integer(-1).less(state.value), moving.value.equals(1))):
            with emit.builder.if_else(automaton.token[state.value].equals(token)) as (then, otherwise):
                with then:
                    _redirect(emit, automaton.target, state.value, (found, clone), moving)
                with otherwise:
                    self._find(emit, header, state.value, token)
                    _redirect(emit, automaton.edge_target, automaton.found.value, (found, clone), moving)
            state.set(automaton.link[state.value])
        automaton.found.set(clone)

    def _emit_add_edge(self, emit: Emitter, header: Int, state: Int, token: Int, target: Int) -> None:
        """Add a further edge, the last in the state's ring."""
        automaton = _Automaton(emit, header)
        edge = automaton.num_edges.value
        automaton.num_edges.set(edge + 1)
        last_edge = automaton.ring[state]
        automaton.edge_state[edge] = state
        automaton.edge_token[edge] = token
        automaton.edge_target[edge] = target
        with emit.builder.if_else(emit.integer(0).less(last_edge)) as (then, otherwise):
            with then:
                automaton.edge_next[edge] = automaton.edge_next[last_edge]
                automaton.edge_next[last_edge] = edge
            with otherwise:
                automaton.edge_next[edge] = edge
        automaton.ring[state] = edge
        bucket = automaton.bucket(automaton.mixed(state, token))
        automaton.edge_chain[edge] = automaton.buckets[bucket]
        automaton.buckets[bucket] = edge
        num_buckets = automaton.low_mask.value + automaton.num_split.value + 1
        with emit.builder.if_then((num_buckets * EDGES_OF_BUCKET).less(edge)):
            self._split(emit, header)

    def _emit_walk(self, emit: Emitter, header: Int, place: Int, token: Int) -> None:
        automaton = _Automaton(emit, header)
        state, length = fields(emit, place, 2)
        found = Variable(emit, -1)
        with repeat_while(emit, lambda: both(emit, emit.integer(-1).less(state.value), found.value.less(0))):
            self._follow(emit, automaton, header, state.value, token, found)
            with emit.builder.if_then(found.value.less(0)):
                state.set(automaton.link[state.value])
                with emit.builder.if_then(emit.integer(-1).less(state.value)):
                    length.set(automaton.length[state.value])
        with emit.builder.if_else(found.value.less(0)) as (then, otherwise):
            with then:
                state.set(0)
                length.set(0)
            with otherwise:
                state.set(found.value)
                length.set(length.value + 1)


def continued_length(emit: Emitter, header: Int, state: Int) -> Int:
    """Return the length of `SuffixAutomaton.continued` of a state."""
    automaton, at = _Automaton(emit, header), Variable(emit, state)
    with repeat_while(emit, lambda: both(emit, emit.integer(0).less(at.value), automaton.token[at.value].less(0))):
        at.set(automaton.link[at.value])
    return automaton.length[at.value]


def suffix_length(emit: Emitter, header: Int, state: Int) -> Int:
    """Return the length of the longest suffix of a text, at its state, that was there before."""
    automaton = _Automaton(emit, header)
    return automaton.length[automaton.link[state].most(0)]


def _redirect(emit: Emitter, targets: Array, index: Int, change: tuple[Int, Int], moving: Variable) -> None:
    """Change a target from one state to another; if it is a third one, nothing more is to be changed."""
    old, new = change
    with emit.builder.if_else(targets[index].equals(old)) as (then, otherwise):
        with then:
            targets[index] = new
        with otherwise:
            moving.set(0)


def _new_state(automaton: _Automaton, length: Int) -> Int:
    state = automaton.num_states.value
    automaton.num_states.set(state + 1)
    automaton.length[state] = length
    for array, value in (
        (automaton.link, 0), (automaton.count, 0), (automaton.token, -1), (automaton.target, 0), (automaton.ring, 0),
    ):  # fmt: skip
        array[state] = value
    return state


def _count(emit: Emitter, automaton: _Automaton, new: Int) -> None:
    """Count an occurrence of a state, and of its suffixes."""
    state, left = Variable(emit, new), Variable(emit, automaton.max_counted.value)
    with repeat_while(emit, lambda: emit.integer(0).less(left.value)):
        automaton.count[state.value] = automaton.count[state.value] + 1
        state.set(automaton.link[state.value])
        left.set((left.value - 1).where(emit.integer(0).less(state.value), 0))


def _find(emit: Emitter, header: Int, state: Int, token: Int) -> None:
    """Set `found` to the further edge of a state with this token; 0: there is none."""
    automaton = _Automaton(emit, header)
    edge, seeking = (
        Variable(emit, automaton.buckets[automaton.bucket(automaton.mixed(state, token))]),
        Variable(emit, 1),
    )
    with repeat_while(emit, lambda: both(emit, emit.integer(0).less(edge.value), seeking.value.equals(1))):
        is_it = both(
            emit, automaton.edge_state[edge.value].equals(state), automaton.edge_token[edge.value].equals(token)
        )
        with emit.builder.if_else(is_it) as (then, otherwise):
            with then:
                seeking.set(0)
            with otherwise:
                edge.set(automaton.edge_chain[edge.value])
    automaton.found.set(edge.value)


def _split_bucket(emit: Emitter, header: Int) -> None:
    """Add a bucket: it takes its part of the edges of the bucket whose turn it is."""
    automaton = _Automaton(emit, header)
    old, half = automaton.num_split.value, automaton.low_mask.value + 1
    edge, kept, moved = (Variable(emit, value) for value in (automaton.buckets[old], 0, 0))
    with repeat_while(emit, lambda: emit.integer(0).less(edge.value)):
        now = edge.value
        edge.set(automaton.edge_chain[now])
        mixed = automaton.mixed(automaton.edge_state[now], automaton.edge_token[now])
        moves = Int(emit, emit.builder.and_(mixed.value, half.value))
        with emit.builder.if_else(emit.integer(0).less(moves)) as (then, otherwise):
            with then:
                automaton.edge_chain[now] = moved.value
                moved.set(now)
            with otherwise:
                automaton.edge_chain[now] = kept.value
                kept.set(now)
    automaton.buckets[old] = kept.value
    automaton.buckets[half + old] = moved.value
    automaton.num_split.set(old + 1)
    with emit.builder.if_then((old + 1).equals(half)):
        automaton.low_mask.set(half * 2 - 1)
        automaton.num_split.set(0)
