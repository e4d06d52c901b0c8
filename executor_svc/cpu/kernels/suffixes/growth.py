"""Machine code for suffix automata: the tokens of all texts of a step, in one call."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

from executor_svc.cpu.kernels.codegen.compiled import Code, shared_code
from executor_svc.cpu.kernels.codegen.emit import Emitter, Int
from executor_svc.cpu.kernels.suffixes.automaton import AutomatonCode, continued_length, suffix_length
from executor_svc.cpu.kernels.suffixes.words import Array, Variable, both, fields, repeat_while
from executor_svc.speculation.suffix_automaton import SuffixAutomaton
from executor_svc.speculation.suffix_texts import (
    CONTEXT,
    DONE,
    MANY,
    OWN_ROOM,
    SHARED_ROOM,
    STEP_FIELDS,
    TEXT_FIELDS,
)


class SuffixKernels:
    """Implements `speculation.suffix_texts.SuffixCode`; for use by one thread at a time."""

    def __init__(self, code: Code | None = None) -> None:
        """code: where it is compiled; by default that of this process."""
        code = code or shared_code()
        automata = AutomatonCode(code)
        grow = code.function("suffix_grow", 1, lambda emit, step: _grow(emit, automata, step))
        extend = code.function("suffix_extend_text", 4, automata.add_tokens)
        self._grow = ctypes.CFUNCTYPE(None, ctypes.c_int64)(code.address(grow))
        self._extend = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(code.address(extend))

    def grow(self, step: int) -> None:
        """As in `SuffixCode`."""
        self._grow(step)

    def extend(self, automaton: SuffixAutomaton, state: int, tokens: array[int]) -> int:
        """As in `Extender`."""
        place = array("q", [state, 0])
        while True:
            self._extend(automaton.address, tokens.buffer_info()[0], len(tokens), place.buffer_info()[0])
            if place[1] == len(tokens):
                return place[0]
            automaton.grow()


class _GrowthStep:
    """The fields of a call."""

    def __init__(self, emit: Emitter, address: Int) -> None:
        own = dict(zip(STEP_FIELDS, fields(emit, address, len(STEP_FIELDS)), strict=True))
        self.next_row, self.num_matching, self.outcome = own["next_row"], own["num_matching"], own["outcome"]
        self.num_rows, self.rows, self.table = (own[name].value for name in ("num_rows", "rows", "table"))
        self.num_tokens, self.num_prompt = own["num_tokens"].value, own["num_prompt_tokens"].value
        self.token_ids, self.row_bytes = own["token_ids"].value, own["row_bytes"].value
        self.always, self.min_match = own["always"].value, own["min_match"].value
        self.own_ends, self.shared_ends = own["own_ends"].value, own["shared_ends"].value


def _grow(emit: Emitter, automata: AutomatonCode, address: Int) -> None:
    """Emit `SuffixCode.grow`."""
    step = _GrowthStep(emit, address)
    step.outcome.set(DONE)
    with repeat_while(
        emit, lambda: both(emit, step.next_row.value.less(step.num_rows), step.outcome.value.equals(DONE))
    ):
        slot, text = _text_at(emit, step, step.next_row.value)
        with emit.builder.if_then(emit.integer(0).less(emit.load_int(text))):
            _grow_text(emit, automata, step, _GrowingText(emit, step, slot, text))
        with emit.builder.if_then(step.outcome.value.equals(DONE)):
            step.next_row.set(step.next_row.value + 1)
    with emit.builder.if_then(step.outcome.value.equals(DONE)):
        _count_matches(emit, step)


def _text_at(emit: Emitter, step: _GrowthStep, row: Int) -> tuple[Int, Int]:
    """Return the slot of a row of the step, and the address of its text."""
    slot = emit.load_int(step.rows + row * 8)
    return slot, step.table + slot * (8 * len(TEXT_FIELDS))


def _count_matches(emit: Emitter, step: _GrowthStep) -> None:
    """Count the texts that match, once all have grown: one may continue what another ends with."""
    row, matches = Variable(emit, 0), Variable(emit, 0)
    with repeat_while(emit, lambda: row.value.less(step.num_rows)):
        slot, text = _text_at(emit, step, row.value)
        matches.set(0)
        with emit.builder.if_then(emit.integer(0).less(emit.load_int(text))):
            _match(emit, step, _GrowingText(emit, step, slot, text), matches)
        step.num_matching.set(step.num_matching.value + matches.value)
        row.set(row.value + 1)


class _GrowingText:
    """A text of the step: that of its next row."""

    def __init__(self, emit: Emitter, step: _GrowthStep, slot: Int, address: Int) -> None:
        own = fields(emit, address, len(TEXT_FIELDS))
        self.own, self.state, self.num_indexed, self.shared, self.shared_state, self.num_shared = own[:6]
        self.older, self.older_state, _ = own[6:]
        # Pairs of fields that tokens are added to, or that walk.
        self.own_place, self.shared_place, self.older_place = (
            address + 8 * TEXT_FIELDS.index(name) for name in ("state", "shared_state", "older_state")
        )
        self.num_known = emit.load_int(step.num_tokens + slot * 8)
        self.num_prompt = emit.load_int(step.num_prompt + slot * 8)
        self.tokens = step.token_ids + slot * step.row_bytes


def _grow_text(emit: Emitter, automata: AutomatonCode, step: _GrowthStep, text: _GrowingText) -> None:
    """Emit what is done for a text."""
    end = _end_of(emit, step, text, step.own_ends, text.num_indexed.value)
    with emit.builder.if_then(step.outcome.value.equals(DONE)):
        automata.add_tokens(emit, text.own.value, text.tokens, end, text.own_place)
        with emit.builder.if_then(text.num_indexed.value.less(end)):
            step.outcome.set(OWN_ROOM)
    is_shared = emit.integer(0).less(text.shared.value)
    with emit.builder.if_then(both(emit, step.outcome.value.equals(DONE), is_shared)):
        _share(emit, automata, step, text)


def _end_of(emit: Emitter, step: _GrowthStep, text: _GrowingText, ends: Int, start: Int) -> Int:
    """Return where a text's part of this step ends; the outcome is MANY if that has yet to be set."""
    end = Variable(emit, text.num_known)
    with emit.builder.if_else(ends.equals(0)) as (then, otherwise):
        with then, emit.builder.if_then(step.always.less(text.num_known - start)):
            step.outcome.set(MANY)
        with otherwise:
            end.set(emit.load_int(ends + step.next_row.value * 8))
    return end.value


def _share(emit: Emitter, automata: AutomatonCode, step: _GrowthStep, text: _GrowingText) -> None:
    """Add a text's tokens to the automaton that it shares, and walk in the one before that."""
    with emit.builder.if_then(text.num_shared.value.less(0)):
        text.num_shared.set((text.num_prompt.least(text.num_known) - CONTEXT).most(0))
    end, place = _end_of(emit, step, text, step.shared_ends, text.num_shared.value), Variable(emit, 0)
    with emit.builder.if_then(step.outcome.value.equals(DONE)):
        place.set(text.num_shared.value)
        automata.add_tokens(emit, text.shared.value, text.tokens, end, text.shared_place)
        has_older = emit.integer(0).less(text.older.value)
        with emit.builder.if_then(has_older), repeat_while(emit, lambda: place.value.less(text.num_shared.value)):
            automata.walk(emit, text.older.value, text.older_place, Array(emit, text.tokens)[place.value])
            place.set(place.value + 1)
        with emit.builder.if_then(text.num_shared.value.less(end)):
            step.outcome.set(SHARED_ROOM)


def _match(emit: Emitter, step: _GrowthStep, text: _GrowingText, matches: Variable) -> None:
    """Set `matches` to 1 if a text's end was there before, or if it is not wholly indexed."""

    def note(condition: Any) -> None:
        matches.set(emit.integer(1).where(condition, matches.value))

    too_short = step.min_match - 1
    note(text.num_indexed.value.less(text.num_known))
    note(too_short.less(suffix_length(emit, text.own.value, text.state.value)))
    for header, state in ((text.shared, text.shared_state), (text.older, text.older_state)):
        with emit.builder.if_then(emit.integer(0).less(header.value)):
            note(too_short.less(continued_length(emit, header.value, state.value)))
