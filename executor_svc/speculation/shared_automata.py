"""Suffix automata of the outputs of many sequences: one for each scope number, bounded in bytes together."""

from __future__ import annotations

from collections import OrderedDict

from executor_svc.speculation.suffix_automaton import SuffixAutomaton

SMALLEST_MAX_BYTES = 1 << 20
"""The least bound in bytes above 0."""

# Bytes of the Python objects of a scope, which `SuffixAutomaton.num_bytes` does not count.
_SCOPE_BYTES = 1400


class Scope:
    """The automata of a scope: a growing one, and the one before it, which nothing is added to."""

    def __init__(self) -> None:
        self.recent = SuffixAutomaton()
        self.older: SuffixAutomaton | None = None
        self.older_bytes = 0
        self.num_bytes = 0


class SharedAutomata:
    """The automata of all scopes. Nothing that one scope's sequences add is seen from another.

    Nothing can be removed from a suffix automaton, so each scope has two: once the first is large enough, a new one
    begins, and the one before it is dropped. Over the bound, the scope that was used least recently loses its older
    automaton, or all. A scope is used when a sequence begins in it, and when it grows.
    """

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: the most bytes of all scopes together; raises ValueError if it is too few for one scope."""
        if max_bytes < SMALLEST_MAX_BYTES:
            raise ValueError(f"max_bytes {max_bytes} must be at least {SMALLEST_MAX_BYTES}")
        # What is added between two checks, and the room that arrays reserve as they grow, fit in the rest.
        self._bound = max_bytes - max_bytes // 8
        self._scopes: OrderedDict[int, Scope] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of all scopes."""
        return sum(
            _SCOPE_BYTES + scope.recent.num_bytes + (scope.older.num_bytes if scope.older is not None else 0)
            for scope in self._scopes.values()
        )

    def use(self, number: int) -> Scope:
        """Return a scope, now the most recently used one; made if it is not there. Then `check` is due."""
        scope = self._scopes.get(number)
        if scope is None:
            scope = self._scopes[number] = Scope()
        else:
            self._scopes.move_to_end(number)
        return scope

    def check(self, number: int) -> list[int]:
        """Drop what is over the bound, after one scope has grown; return the scopes whose automata have changed."""
        changed, scope = list[int](), self._scopes[number]
        recent_bytes = scope.recent.num_bytes
        if recent_bytes > self._bound * 7 // 16:
            scope.older, scope.older_bytes = scope.recent, recent_bytes
            scope.recent = SuffixAutomaton()
            recent_bytes = scope.recent.num_bytes
            changed.append(number)
        self._num_bytes -= scope.num_bytes
        scope.num_bytes = _SCOPE_BYTES + recent_bytes + scope.older_bytes
        self._num_bytes += scope.num_bytes
        while self._num_bytes > self._bound:
            least, scope = next(iter(self._scopes.items()))
            changed.append(least)
            if scope.older is not None:
                freed = scope.older_bytes
                scope.older, scope.older_bytes = None, 0
                scope.num_bytes -= freed
            else:
                freed = scope.num_bytes
                del self._scopes[least]
            self._num_bytes -= freed
        return changed
