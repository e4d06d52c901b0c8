"""Compiles grammars, each once while it is in use, on the threads that need them.

A compiled grammar is llguidance's matcher at the beginning of an output. Its copies are cheap because they share a
lexer, which keeps the states that it has built: so what one copy has paid for, the others get for nothing. But an error
of the shared lexer (a limit, a panic) is an error of all copies. `GrammarState` finds out which of them would have had
it alone; see there.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from cadenza.grammar.bounded_cache import BoundedCache
from cadenza.grammar.compiling import new_matcher
from cadenza.grammar.spec import GrammarSpec
from cadenza.grammar.table import TableSource

_MAX_COMPILED = 64
MAX_COMPILED_BYTES = 2**28
"""Of compiled grammars without sequences that have them, by the estimate of `compiled_bytes`."""
_BYTES_OF_LEXER = 2**20
_BYTES_PER_CHAR = 400


@dataclass(eq=False, slots=True)
class Compiled:
    """A compiled grammar, from which sequences begin."""

    base: Any
    """An `llguidance.LLMatcher` that has taken nothing."""
    lock: Any = field(default_factory=threading.Lock)
    """Held by whoever uses a copy: the library's own lock of the lexer would be waited for with the interpreter's."""

    def matcher(self) -> Any:
        """Return a copy at the beginning of an output; takes 15 us."""
        return self.base.deep_copy()


def compiled_bytes(spec: GrammarSpec) -> int:
    """Estimate the memory of a compiled grammar from the length of its text: the library does not say.

    The factors are guesses so far; only the order among grammars and the bound on their number follow from them.
    """
    return _BYTES_OF_LEXER + _BYTES_PER_CHAR * (len(spec.text) + sum(map(len, spec.choices)))


class Compiler:
    """Compiles grammars for one table of tokens; for use by several threads."""

    def __init__(self, source: TableSource, max_bytes: int = MAX_COMPILED_BYTES) -> None:
        """Read nothing yet: `prepare` does, or the first grammar. max_bytes: of compiled grammars."""
        self._source = source
        self._table: Any = None
        self._table_lock = threading.Lock()
        self._lock = threading.Lock()
        self._compiled: BoundedCache[GrammarSpec, Compiled] = BoundedCache(_MAX_COMPILED, max_bytes)
        self._running: dict[GrammarSpec, Future[Compiled]] = {}

    @property
    def source(self) -> TableSource:
        """What the table is made from."""
        return self._source

    def prepare(self) -> None:
        """Make the table of tokens: llguidance holds the interpreter's lock meanwhile, a second for 131,072 tokens.

        Raises OSError for a lost file, ValueError for one that llguidance cannot read.
        """
        with self._table_lock:
            if self._table is None:
                self._table = self._source.table()

    def has(self, spec: GrammarSpec) -> bool:
        """Whether a grammar is compiled, so that `compiled` takes no time."""
        with self._lock:
            return self._compiled.get(spec) is not None

    def compiled(self, spec: GrammarSpec) -> Compiled:
        """Return a compiled grammar; raises GrammarError, and the errors of `prepare`.

        Threads that ask for a grammar that is being compiled wait for it; those that ask for others do not.
        """
        with self._lock:
            if (found := self._compiled.get(spec)) is not None:
                return found
            future = self._running.get(spec)
            is_first = future is None
            if future is None:
                future = self._running[spec] = Future()
        return self._compile(spec, future) if is_first else future.result()

    def fresh(self, spec: GrammarSpec) -> Compiled:
        """Return a compiled grammar that shares nothing with others; errors as `compiled`."""
        self.prepare()
        return Compiled(new_matcher(spec, self._table))

    def forget(self, spec: GrammarSpec, compiled: Compiled) -> None:
        """Let the next sequence with this grammar compile it anew, as this one's lexer has failed."""
        with self._lock:
            if self._compiled.get(spec) is compiled:
                self._compiled.remove(spec)

    def _compile(self, spec: GrammarSpec, future: Future[Compiled]) -> Compiled:
        try:
            compiled = self.fresh(spec)
        except BaseException as error:  # llguidance's panics are no Exceptions
            with self._lock:
                del self._running[spec]
            future.set_exception(error)
            raise
        with self._lock:
            del self._running[spec]
            self._compiled.put(spec, compiled, compiled_bytes(spec))
        future.set_result(compiled)
        return compiled
