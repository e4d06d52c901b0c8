"""The state of one sequence's grammar: a function of its specification and of the token ids after its prompt.

That holds for masks. For limits it holds in one direction: the lexer that sequences with the same grammar share reaches
some limits earlier (the states of all count) and others later (states that are there cost nothing). So when one is
reached, the sequence's tokens are walked again on a lexer of its own, with a mask at each, and only what fails there
fails. A sequence therefore never ends by a limit that it would not reach alone, from the beginning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np

from cadenza_common.grammar.compiling import GrammarError, short
from cadenza_common.grammar.spec import GrammarSpec
from executor_svc.sampling.masks import Words, num_mask_words
from executor_svc.structured.compiler import Compiled, Compiler

_SLICE = 64
"""Tokens taken in one call of the library, which holds the interpreter's lock."""
_MOST_MOVED = 512
"""Tokens of a sequence that may move to another lexer, which takes them all again: a millisecond or two."""


class GrammarState:
    """The state of one sequence's grammar, and the masks of its next tokens. For use by one thread at a time."""

    def __init__(self, spec: GrammarSpec, compiler: Compiler, max_drafts: int) -> None:
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
        self.bits: Words = np.zeros((1 + max_drafts, num_mask_words(compiler.source.vocab_size)), np.uint32)
        # To ask an array for its address takes longer than most masks.
        self._address, self._row_bytes = self.bits.ctypes.data, self.bits.strides[0]
        self.tokens: list[int] = []
        """The output so far."""
        self.last_s = 0.0
        """Seconds of a processor that the last part of its work took."""
        self.is_abandoned = False
        """Whether nobody needs it any more: work on it ends early. Set by the device thread."""
        self._compiler = compiler
        self._eos = compiler.source.eos_token_ids
        self._eos_bits = compiler.eos_bits
        self._compiled: Compiled | None = None
        self._matcher: Any = None
        self._is_alone = False
        """Whether its lexer is its own."""
        self.must_walk = False
        """Whether a lexer that it shares has failed, so that `walk_alone` is to find out about its tokens."""

    @property
    def lexer(self) -> int:
        """The number of the lexer, among those of its grammar; 0 before it has one."""
        return 0 if self._compiled is None else self._compiled.number

    @property
    def compiled(self) -> Compiled | None:
        """The grammar and the lexer that it uses; None before it has one."""
        return self._compiled

    @property
    def lexer_is_busy(self) -> bool:
        """Whether another thread has the lexer, which this sequence shares."""
        return self._compiled is not None and self._compiled.lock.locked()

    def begin(self, token_ids: Sequence[int], compiled: Future[Compiled] | None = None) -> None:
        """Take the tokens of an output so far, and make the next token's mask.

        compiled: the grammar; None: the compiler is asked, and waited for.
        """
        self.tokens = list(token_ids)
        self._guarded(lambda: self._begin(compiled or self._compiler.request(self.spec)))

    def begin_from(self, other: GrammarState, token_ids: Sequence[int]) -> Callable[[], None]:
        """As `begin`, from a state whose tokens are the first of these, and which may go on as soon as this returns.

        Returns the work that is left for a thread.
        """
        self.tokens = list(token_ids)
        # From now on they share a lexer.
        assert other._compiled is not None
        other._is_alone = False
        self._use(other._compiled)
        self.is_constrained, self._matcher = other.is_constrained, other._matcher.deep_copy()
        known = len(other.tokens)
        return lambda: self._guarded(lambda: self._take(known))

    def take(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens of the output, and make the next token's mask."""
        known = len(self.tokens)
        self.tokens += token_ids
        self._guarded(lambda: self._take(known))

    def look_ahead(self, drafts: Sequence[int]) -> None:
        """Make a mask behind each draft, up to the first that is not allowed; the state stays."""
        self._guarded(lambda: self._look_ahead(drafts))

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """Return how many of these tokens may follow each other next, of which none ends the output.

        0 if a thread has the lexer at this moment: it is not waited for.
        """
        if self.error or self._compiled is None:
            return 0
        if not self.is_constrained:
            # Behind the last of the ids that begin it there would have to be a mask.
            last = self.spec.start_after_token_ids[-1]
            return next((i for i, token in enumerate(drafts) if token == last), len(drafts))
        if not self._compiled.lock.acquire(blocking=False):
            return 0
        try:
            ends = next((i for i, token in enumerate(drafts) if token in self._eos), len(drafts))
            return int(self._matcher.validate_tokens(list(drafts[:ends])))
        except BaseException:  # A failed lexer is found out by the next part of the work.
            return 0
        finally:
            self._compiled.lock.release()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run a part; whatever goes wrong in it is this sequence's error alone."""
        if self.error or self.is_abandoned:
            return
        # Of the processor: who waits for a lexer, or for the interpreter, is not slow.
        began = time.thread_time()
        try:
            work()
        except BaseException as error:  # llguidance's panics are no Exceptions
            if self._compiled is None or self._is_alone:
                self.error = short(str(error)) or type(error).__name__
            else:
                self.must_walk = True
        self.last_s = time.thread_time() - began

    def _begin(self, compiled: Future[Compiled]) -> None:
        self._begin_on(compiled.result())
        self._take(0)

    def _begin_on(self, compiled: Compiled) -> None:
        """Stand at the beginning of the output, with this lexer."""
        self._use(compiled)
        self._matcher = compiled.matcher()
        self.is_constrained = not self.spec.start_after_token_ids

    def _use(self, compiled: Compiled) -> None:
        if self._compiled is not None:
            self._compiled.sequences.discard(self)
        self._compiled = compiled
        compiled.sequences.add(self)

    def walk_alone(self) -> None:
        """Take all tokens anew on a lexer of its own, with a mask at each: what fails here, the sequence alone fails.

        Does nothing unless `must_walk`.
        """
        if self.must_walk:
            self.must_walk = False
            self._guarded(self._walk_alone)

    def _walk_alone(self) -> None:
        assert self._compiled is not None
        self._compiler.forget(self.spec, self._compiled)
        self._is_alone = True
        self._begin_on(self._compiler.fresh_in_turn(self.spec))
        for index in range(len(self.tokens)):
            if self.is_abandoned:
                return
            if self.is_constrained:
                self._make_mask(0, self._matcher)
            self._consume(index, index + 1)
        self._take(len(self.tokens))

    def _take(self, known: int) -> None:
        """Take the tokens behind the first `known`, and make the next mask."""
        assert self._compiled is not None
        self.num_masks, self.forced = 0, ()
        if len(self.tokens) <= _MOST_MOVED and not self._is_alone:
            lighter = self._compiler.lighter(self.spec, self._compiled)
            if lighter is not None:
                self._begin_on(lighter)
                known = 0
        for first in range(known, len(self.tokens), _SLICE):
            with self._compiled.lock:
                self._consume(first, min(first + _SLICE, len(self.tokens)))
            if self.is_abandoned:
                return
        if not self.is_constrained:
            return
        with self._compiled.lock:
            self._make_mask(0, self._matcher)
            self.num_masks = 1
            self.forced = tuple(self._matcher.compute_ff_tokens())

    def _consume(self, first: int, end: int) -> None:
        """Take tokens[first:end]; raises GrammarError."""
        if not self.is_constrained:
            first = self._behind_start(first, end)
        if first < end and not self._matcher.consume_tokens(self.tokens[first:end]):
            raise GrammarError(self._matcher.get_error() or "the grammar does not allow the tokens of the output")

    def _behind_start(self, first: int, end: int) -> int:
        """Return the index behind the tokens that begin the constraint, if they end in tokens[first:end]; else end."""
        start = list(self.spec.start_after_token_ids)
        for index in range(first + 1, end + 1):
            if self.tokens[max(0, index - len(start)) : index] == start:
                self.is_constrained = True
                return index
        return end

    def _look_ahead(self, drafts: Sequence[int]) -> None:
        if not self.is_constrained or self._compiled is None:
            return
        with self._compiled.lock:
            # Of its own, so that what it takes behind a draft is not taken by the sequence.
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
            matcher.unsafe_compute_mask_ptr(self._address + row * self._row_bytes, self._row_bytes)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        # The library knows one id that ends an output; a model may have several.
        for word, bit in self._eos_bits:
            bits[word] &= ~bit
        if matcher.is_accepting() and not (self.spec.eos_last_only and bits.any()):
            for word, bit in self._eos_bits:
                bits[word] |= bit
