"""Compiles grammars, each once while it is in use, on a few threads.

A compiled grammar is llguidance's matcher at the beginning of an output. Its copies are cheap because they share a
lexer, which keeps the states that it has built: so what one copy has paid for, the others get for nothing. But an error
of the shared lexer (a limit, a panic) is an error of all copies. `GrammarState` finds out which of them would have had
it alone; see there. Only one thread at a time can use a lexer, so a grammar of many sequences is compiled again, up to
`num_lexers` times, and its sequences move to the lexer with the fewest of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np

from cadenza_common.grammar.bounded_cache import BoundedCache
from cadenza_common.grammar.compiling import new_matcher
from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.grammar.table import TableSource
from executor_svc.sampling.masks import num_mask_words
from executor_svc.structured.compile_turns import CompileTurns, Turn

_MAX_COMPILED = 64
MAX_COMPILED_BYTES = 2**28
"""Of compiled grammars without sequences that have them, by the estimate of `compiled_bytes`."""
_BYTES_OF_LEXER = 2**22
_BYTES_PER_CHAR = 512
_MAX_WALKS = 2
"""Compilations at once for sequences that go on alone, beside the others."""
_SEQUENCES_OF_LEXER = 8
"""A lexer with more sequences gets another beside it."""
_NOBODY = -1
"""Who asks for it, among the tenants whose turns there are."""


@dataclass(eq=False, slots=True)
class Compiled:
    """A compiled grammar with one lexer, from which sequences begin."""

    base: Any
    """An `llguidance.LLMatcher` that has taken nothing."""
    lock: Any = field(default_factory=threading.Lock)
    """Held by whoever uses a copy: the library's own lock of the lexer would be waited for with the interpreter's."""

    first_s: float = 0.0
    """Seconds that the first mask of a sequence takes, as `warm` has found."""

    number: int = 0
    """Of the lexer, among those of its grammar."""

    sequences: WeakSet[Any] = field(default_factory=WeakSet)
    """The states that share the lexer."""

    def warm(self, vocab_size: int) -> None:
        """Make the first mask where the grammar is compiled: the shared lexer keeps what takes long in it.

        What a second one still takes, each sequence's takes.
        """
        bits = np.zeros(num_mask_words(vocab_size), np.uint32)
        try:
            for _ in range(2):
                began, matcher = time.perf_counter(), self.matcher()
                matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
                matcher.compute_ff_tokens()
                self.first_s = time.perf_counter() - began
        except BaseException:  # a sequence finds out, on a thread of its own
            self.first_s = float("inf")

    def matcher(self) -> Any:
        """Return a copy at the beginning of an output; takes 15 us."""
        return self.base.deep_copy()


def compiled_bytes(spec: GrammarSpec) -> int:
    """Estimate the memory of a compiled grammar from the length of its text: the library does not say.

    By the growth of a process with llguidance 1.9.1 and 2,048 tokens, over 13 grammars of all forms: 0.6 to 0.8 MB and
    37 to 525 bytes for each character after the compilation; 0.2 to 2.6 MB more for the lexer's states after four
    outputs of 250 tokens. Few have more: of six expressions whose states explode, five grew by 2 to 8 MB in outputs of
    500,000 tokens, one by 40.
    """
    return _BYTES_OF_LEXER + _BYTES_PER_CHAR * (len(spec.text) + sum(map(len, spec.choices)))


@dataclass(eq=False, slots=True)
class _Compilation:
    """A grammar that is not compiled yet."""

    turn: Turn
    result: Future[Compiled] = field(default_factory=Future)
    wanted: list[Callable[[], bool]] = field(default_factory=list)
    """For each caller: whether it still wants the result."""


class Compiler:
    """Compiles grammars for one table of tokens; for use by several threads."""

    def __init__(self, source: TableSource, max_bytes: int = MAX_COMPILED_BYTES, num_lexers: int = 1) -> None:
        """Read nothing yet: `prepare` does, or the first grammar.

        max_bytes: of compiled grammars. num_lexers: the most of one grammar.
        """
        self._source = source
        self.num_lexers = num_lexers
        self.eos_bits = [(eos // 32, np.uint32(1 << eos % 32)) for eos in source.eos_token_ids]
        """The word of a mask, and the bit in it, of each id that ends an output."""
        self._table: Any = None
        self._table_lock = threading.Lock()
        self._lock = threading.Lock()
        self._compiled: BoundedCache[GrammarSpec, list[Compiled]] = BoundedCache(_MAX_COMPILED, max_bytes)
        """By grammar, its lexers in the order of their numbers."""
        self._growing: set[GrammarSpec] = set()
        """Grammars that get another lexer."""
        self._running: dict[GrammarSpec, _Compilation] = {}
        self._turns = CompileTurns()
        self._walks = threading.BoundedSemaphore(_MAX_WALKS)

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
        """Whether a grammar is compiled and kept."""
        with self._lock:
            return self._compiled.get(spec) is not None

    def request(
        self, spec: GrammarSpec, asked_by: int = 0, is_wanted: Callable[[], bool] = lambda: True
    ) -> Future[Compiled]:
        """Let a grammar be compiled, in the turn of whoever asks; its errors: GrammarError, and those of `prepare`.

        Cancelled if nobody wants it when its turn comes. A compilation is shared by all who ask for it meanwhile.
        """
        with self._lock:
            if (found := self._compiled.get(spec)) is not None:
                done: Future[Compiled] = Future()
                done.set_result(_lightest(found))
                return done
            compilation = self._running.get(spec)
            if compilation is None:
                compilation = self._running[spec] = _Compilation(Turn(partial(self._compile, spec)))
            compilation.wanted.append(is_wanted)
        self._turns.run(compilation.turn, asked_by)
        return compilation.result

    def fresh(self, spec: GrammarSpec) -> Compiled:
        """Compile a grammar here and now, for one who shares nothing with others; errors as `request`."""
        self.prepare()
        return Compiled(new_matcher(spec, self._table, apart=True))

    def fresh_in_turn(self, spec: GrammarSpec) -> Compiled:
        """As `fresh`, behind others who want the same for theirs."""
        with self._walks:
            return self.fresh(spec)

    def lighter(self, spec: GrammarSpec, compiled: Compiled) -> Compiled | None:
        """Return a lexer of the same grammar with fewer sequences, by two or more; None: this one is as good as any.

        Lets the grammar get another lexer if this one has many sequences.
        """
        if self.num_lexers == 1:
            return None
        with self._lock:
            lexers = self._compiled.get(spec)
            if lexers is None or compiled not in lexers:
                return None
            found, count = _lightest(lexers), len(compiled.sequences)
            if count - len(found.sequences) > 1:
                return found
            if count <= _SEQUENCES_OF_LEXER or len(lexers) == self.num_lexers or spec in self._growing:
                return None
            self._growing.add(spec)
        self._turns.run(Turn(partial(self._add_lexer, spec)), _NOBODY)
        return None

    def forget(self, spec: GrammarSpec, compiled: Compiled) -> None:
        """Let the next sequence with this grammar compile it anew, as this one's lexer has failed."""
        with self._lock:
            if compiled in (self._compiled.get(spec) or ()):
                self._compiled.remove(spec)

    def _add_lexer(self, spec: GrammarSpec) -> None:
        """Compile a grammar once more, if it is still in use."""
        more: Compiled | None = None
        with suppress(BaseException):  # llguidance's panics are no Exceptions; what is there goes on
            if self.has(spec):
                more = self.fresh(spec)
                more.warm(self._source.vocab_size)
        with self._lock:
            self._growing.discard(spec)
            lexers = self._compiled.get(spec)
            if more is not None and lexers is not None:
                more.number = len(lexers)
                self._compiled.put(spec, [*lexers, more], compiled_bytes(spec) * (len(lexers) + 1))

    def _compile(self, spec: GrammarSpec) -> None:
        with self._lock:
            compilation = self._running[spec]
            if not any(is_wanted() for is_wanted in compilation.wanted):
                del self._running[spec]
                compilation.result.cancel()
                compilation.result.set_running_or_notify_cancel()
                return
        try:
            compiled = self.fresh(spec)
            compiled.warm(self._source.vocab_size)
        except BaseException as error:  # llguidance's panics are no Exceptions
            with self._lock:
                del self._running[spec]
            compilation.result.set_exception(error)
            return
        with self._lock:
            del self._running[spec]
            self._compiled.put(spec, [compiled], compiled_bytes(spec))
        compilation.result.set_result(compiled)


def _lightest(lexers: list[Compiled]) -> Compiled:
    """Return the lexer with the fewest sequences, the first of several."""
    return min(lexers, key=lambda each: len(each.sequences))
