"""Suffix automata of the outputs of many sequences: one for each scope number, bounded in bytes together."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from executor_svc.speculation.suffix_automaton import ROOT, SuffixAutomaton

SMALLEST_MAX_BYTES = 1 << 20
"""The least bound in bytes above 0."""

# The bound is checked after so many tokens, and once a step.
_TOKENS_BETWEEN_CHECKS = 1024
# Bytes of the Python objects of a scope, which `SuffixAutomaton.num_bytes` does not count: 590 measured.
_SCOPE_BYTES = 640
# Tokens before a sequence's first output that are added with it, so that drafts of the first outputs can match.
_CONTEXT = 16


class _Scope:
    """The automata of a scope: a growing one, and the one before it, which nothing is added to."""

    def __init__(self, generation: int) -> None:
        self.recent = SuffixAutomaton()
        self.older: SuffixAutomaton | None = None
        self.older_bytes = 0
        self.num_bytes = 0
        self.generation = generation
        """Changes with the automata: states are valid for one generation."""


class SharedAutomata:
    """The automata of all scopes. Nothing that one scope's sequences add is seen from another.

    Nothing can be removed from a suffix automaton, so each scope has two: once the first is large enough, a new one
    begins, and the one before it is dropped. Over the bound, the scope that was used least recently loses its older
    automaton, or all.
    """

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: the most bytes of all scopes together; raises ValueError if it is too few for one scope."""
        if max_bytes < SMALLEST_MAX_BYTES:
            raise ValueError(f"max_bytes {max_bytes} must be at least {SMALLEST_MAX_BYTES}")
        # What is added between two checks, and the room that arrays reserve as they grow, fit in the rest.
        self._bound = max_bytes - max_bytes // 8
        self._scopes: OrderedDict[int, _Scope] = OrderedDict()
        self._changed: dict[int, None] = {}
        self._num_bytes = 0
        self._num_added = 0
        self._num_generations = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of all scopes."""
        return sum(
            _SCOPE_BYTES + scope.recent.num_bytes + (scope.older.num_bytes if scope.older is not None else 0)
            for scope in self._scopes.values()
        )

    def use(self, number: int, num_added: int) -> _Scope:
        """Return a scope, now the most recently used one, to which so many tokens are added."""
        self._num_added += num_added
        if self._num_added > _TOKENS_BETWEEN_CHECKS:
            self.check()
            self._num_added = num_added
        scope = self._scopes.get(number)
        if scope is None:
            scope = self._scopes[number] = _Scope(self._next_generation())
        else:
            self._scopes.move_to_end(number)
        self._changed[number] = None
        return scope

    def check(self) -> None:
        """Drop what is over the bound."""
        self._num_added = 0
        for number in self._changed:
            scope = self._scopes[number]
            recent_bytes = scope.recent.num_bytes
            if recent_bytes > self._bound * 7 // 16:
                scope.older, scope.older_bytes = scope.recent, recent_bytes
                scope.recent = SuffixAutomaton()
                recent_bytes = scope.recent.num_bytes
                scope.generation = self._next_generation()
            self._num_bytes -= scope.num_bytes
            scope.num_bytes = _SCOPE_BYTES + recent_bytes + scope.older_bytes
            self._num_bytes += scope.num_bytes
        self._changed.clear()
        while self._num_bytes > self._bound:
            number, scope = next(iter(self._scopes.items()))
            if scope.older is not None:
                freed = scope.older_bytes
                scope.older, scope.older_bytes = None, 0
                scope.num_bytes -= freed
                scope.generation = self._next_generation()
            else:
                freed = scope.num_bytes
                scope.recent, scope.generation = SuffixAutomaton(), 0
                del self._scopes[number]
            self._num_bytes -= freed

    def _next_generation(self) -> int:
        self._num_generations += 1
        return self._num_generations


class SharedSequence:
    """The place of a sequence in the automata of its scope."""

    def __init__(self, automata: SharedAutomata, number: int) -> None:
        self._automata = automata
        self._number = number
        self._scope: _Scope | None = None
        self._generation = 0
        self._state = ROOT
        self._older = (ROOT, 0)

    def extend(self, token_ids: NDArray[np.int32], start: int, tokens: list[int]) -> None:
        """Add the tokens [start, start + len(tokens)) of a text; those before were added, or are not outputs.

        token_ids: [start or more] the text.
        """
        scope = self._automata.use(self._number, len(tokens))
        if scope is not self._scope or scope.generation != self._generation:
            tokens = [*token_ids[max(start - _CONTEXT, 0) : start].tolist(), *tokens]
            self._scope, self._generation = scope, scope.generation
            self._state, self._older = ROOT, (ROOT, 0)
        state, recent = self._state, scope.recent
        for token in tokens:
            state = recent.extend(state, token)
        self._state = state
        if scope.older is not None:
            state, length = self._older
            for token in tokens:
                state, length = scope.older.walk(state, length, token)
            self._older = state, length

    def matches(self) -> list[tuple[SuffixAutomaton, int, int]]:
        """Return (automaton, state, length) of the longest match of the text's end in each automaton."""
        scope = self._scope
        if scope is None or scope.generation != self._generation:
            return []
        found = [(scope.recent, self._state, scope.recent.length[self._state])]
        if scope.older is not None:
            found.append((scope.older, *self._older))
        return found
