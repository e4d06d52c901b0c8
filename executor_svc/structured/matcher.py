"""The state of one sequence's grammar: a function of its specification and of the token ids after its prompt."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from cadenza.grammar.compiling import GrammarError, new_matcher, short
from cadenza.grammar.spec import GrammarSpec
from cadenza.grammar.table import TableSource
from executor_svc.sampling.masks import Words, num_mask_words

_MAX_COMPILED = 64


class Compiler:
    """Compiles grammars, each once while it is among the last _MAX_COMPILED; for use by several threads."""

    def __init__(self, source: TableSource) -> None:
        """Read nothing yet: the table is made for the first grammar."""
        self._source = source
        self._table: Any = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[GrammarSpec, Any] = OrderedDict()

    @property
    def source(self) -> TableSource:
        """What the table is made from."""
        return self._source

    def matcher(self, spec: GrammarSpec) -> Any:
        """Return a new matcher at the beginning of an output; raises GrammarError, and OSError for a lost file.

        Takes 15 us for a grammar that was compiled before. Others wait while one is compiled, as it has the machine.
        """
        with self._lock:
            if self._table is None:
                self._table = self._source.table()
            found = self._compiled.get(spec)
            if found is None:
                found = self._compiled[spec] = new_matcher(spec, self._table)
                if len(self._compiled) > _MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(spec)
            return found.deep_copy()


class GrammarState:
    """The state of one sequence's grammar, and the masks of its next tokens. For use by one thread at a time."""

    def __init__(self, spec: GrammarSpec, source: TableSource, max_drafts: int) -> None:
        """max_drafts: tokens ahead of the sequence's last one for which there may be masks."""
        self.spec = spec
        self.is_constrained = False
        """Whether the next token has a mask: the constraint has begun."""
        self.error = ""
        """Why the grammar cannot be followed; empty: it can be."""
        self.forced: tuple[int, ...] = ()
        """The next tokens, as far as the grammar leaves one text only; as the tokenizer would write it."""
        self.num_masks = 0
        """Masks in `bits`: of the next token, and of those behind drafts."""
        self.bits: Words = np.zeros((1 + max_drafts, num_mask_words(source.vocab_size)), np.uint32)
        self._eos = np.array(source.eos_token_ids, np.int64)
        self._matcher: Any = None
        self._last: list[int] = []

    def begin(self, compiler: Compiler, token_ids: Sequence[int]) -> None:
        """Compile the grammar, take the tokens of an output so far, and make the next token's mask."""
        self._guarded(lambda: self._begin(compiler, token_ids))

    def take(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens of the output, and make the next token's mask."""
        self._guarded(lambda: self._take(token_ids))

    def look_ahead(self, drafts: Sequence[int]) -> None:
        """Make a mask behind each draft, up to the first that is not allowed; the state stays."""
        self._guarded(lambda: self._look_ahead(drafts))

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """Return how many of these tokens may follow each other next, of which none ends the output."""
        if self.error:
            return 0
        if not self.is_constrained:
            # The constraint may begin behind any of them.
            return len(drafts) if not self.spec.start_after_token_ids else 0
        ends = next((i for i, token in enumerate(drafts) if token in self._eos), len(drafts))
        return int(self._matcher.validate_tokens(list(drafts[:ends])))

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run a part; whatever goes wrong in it is this sequence's error alone."""
        if self.error:
            return
        try:
            work()
        except BaseException as error:  # llguidance's panics are no Exceptions
            self.error = short(str(error)) or type(error).__name__

    def _begin(self, compiler: Compiler, token_ids: Sequence[int]) -> None:
        self._matcher = compiler.matcher(self.spec)
        self.is_constrained = not self.spec.start_after_token_ids
        self._take(token_ids)

    def _take(self, token_ids: Sequence[int]) -> None:
        left = list(token_ids)
        if not self.is_constrained:
            left = self._behind_start(left)
        if left and not self._matcher.consume_tokens(left):
            raise GrammarError(self._matcher.get_error() or "the grammar does not allow the tokens of the output")
        self.num_masks = 0
        self.forced = ()
        if not self.is_constrained:
            return
        self._make_mask(0, self._matcher)
        self.num_masks = 1
        self.forced = tuple(self._matcher.compute_ff_tokens())

    def _behind_start(self, token_ids: list[int]) -> list[int]:
        """Return the tokens behind those that begin the constraint; none if it has not begun."""
        start = list(self.spec.start_after_token_ids)
        for index, token_id in enumerate(token_ids):
            self._last = [*self._last, token_id][-len(start) :]
            if self._last == start:
                self.is_constrained = True
                return token_ids[index + 1 :]
        return []

    def _look_ahead(self, drafts: Sequence[int]) -> None:
        if not self.is_constrained:
            return
        # Of its own, so that a limit that it reaches behind a draft is no error of the sequence.
        ahead = self._matcher.deep_copy()
        for index, draft in enumerate(drafts, 1):
            if draft in self._eos or not ahead.consume_tokens([draft]):
                return
            with suppress(GrammarError):
                self._make_mask(index, ahead)
                self.num_masks = 1 + index

    def _make_mask(self, row: int, matcher: Any) -> None:
        """Write the mask of a matcher's next token; raises GrammarError."""
        bits = self.bits[row]
        if matcher.is_stopped() and not matcher.is_error():
            bits[:] = 0
        else:
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        # The library knows one id that ends an output; a model may have several.
        words, places = self._eos // 32, np.uint32(1) << (self._eos % 32).astype(np.uint32)
        np.bitwise_and.at(bits, words, ~places)
        if matcher.is_accepting() and not (self.spec.eos_last_only and bits.any()):
            np.bitwise_or.at(bits, words, places)
