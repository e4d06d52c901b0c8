"""The texts of all slots in automata: a table in memory, and machine code that adds a step's tokens in one call."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray
from executor_svc.speculation.drafts import tokens_to_index
from executor_svc.speculation.suffix_automaton import Extender

TEXT_FIELDS = (
    *("own", "state", "num_indexed", "shared", "shared_state", "num_shared"),
    *("older", "older_state", "older_length"),
)
"""Of a slot, int64: the header of the text's own automaton (0: it has none), its state there and the tokens that are in
it; the same of the automaton that it shares (0: none; num_shared -1: not known yet); and of the one before that, its
state and the length of its match."""
STEP_FIELDS = (
    *("rows", "num_rows", "next_row", "table", "num_tokens", "num_prompt_tokens", "token_ids", "row_bytes"),
    *("always", "own_ends", "shared_ends", "min_match", "num_matching", "outcome"),
)
"""Of a call, int64: addresses of the slots [n] and of their columns, limits, and what came of it."""
DONE, OWN_ROOM, SHARED_ROOM, MANY = range(4)
"""Outcomes: an automaton of the text `next_row` has no room; a text has more than `always` tokens waiting."""
CONTEXT = 16
"""Tokens before a sequence's first output that are shared with it, so that drafts of the first outputs can match."""

OWN, STATE, NUM_INDEXED, SHARED, SHARED_STATE, NUM_SHARED, OLDER, OLDER_STATE, OLDER_LENGTH = range(len(TEXT_FIELDS))
_AT = {name: index for index, name in enumerate(STEP_FIELDS)}


class SuffixCode(Extender, Protocol):
    """Machine code for automata and texts, as `cpu.kernels.suffixes` has it."""

    def grow(self, step: int) -> None:
        """Add the waiting tokens of a step's texts to their automata, and count the texts that match.

        step: the address of STEP_FIELDS. It goes on at `next_row`, and stops where the outcome is not DONE.
        """
        ...


class SuffixTexts:
    """The table of all slots."""

    def __init__(self, code: SuffixCode, num_slots: int, *, always: int, max_indexed: int, min_match: int) -> None:
        """always, max_indexed: as in `tokens_to_index`, of each step. min_match: the shortest match that counts."""
        self.table = np.zeros((num_slots, len(TEXT_FIELDS)), np.int64)
        self._code = code
        self._always = always
        self._max_indexed = max_indexed
        self._step = np.zeros(len(STEP_FIELDS), np.int64)
        self._step[_AT["table"]] = self.table.ctypes.data
        self._step[_AT["always"]], self._step[_AT["min_match"]] = always, min_match
        self._address = self._step.ctypes.data
        # Numbers of Python, which numpy's are slower than.
        self._fields = self._step.data
        self._of: Slots | None = None
        self._rows = np.zeros(num_slots, np.int64)
        self._ends = np.zeros((2, num_slots), np.int64)

    def begin(self, slots: Slots, rows: IntArray) -> None:
        """Set the texts of a step: those of the slots `rows` [n]."""
        if self._of is not slots:
            self._of = slots
            for name, column in (
                ("num_tokens", slots.num_tokens), ("num_prompt_tokens", slots.num_prompt_tokens),
                ("token_ids", slots.token_ids),
            ):  # fmt: skip
                self._fields[_AT[name]] = column.ctypes.data
            self._fields[_AT["row_bytes"]] = slots.token_ids.strides[0]
            self._fields[_AT["rows"]] = self._rows.ctypes.data
        fields = self._fields
        self._rows[: len(rows)] = rows
        fields[_AT["num_rows"]] = len(rows)
        fields[_AT["next_row"]] = fields[_AT["own_ends"]] = fields[_AT["shared_ends"]] = 0
        fields[_AT["num_matching"]] = 0

    def grow(self) -> tuple[int, int]:
        """Go on with the step; return (outcome, slot): DONE, or the slot whose automaton has no room."""
        fields = self._fields
        self._code.grow(self._address)
        if fields[_AT["outcome"]] == MANY:
            self._set_ends()
            self._code.grow(self._address)
        outcome = fields[_AT["outcome"]]
        return outcome, int(self._rows[fields[_AT["next_row"]]]) if outcome else -1

    @property
    def num_matching(self) -> int:
        """Texts of the step whose end was there before, or that are not wholly indexed."""
        return self._fields[_AT["num_matching"]]

    def _set_ends(self) -> None:
        """Set how far each text is indexed in this step, and begin anew."""
        assert self._of is not None
        rows = self._rows[: self._fields[_AT["num_rows"]]]
        known, texts = self._of.num_tokens[rows], self.table[rows]
        begun = np.minimum(self._of.num_prompt_tokens[rows], known) - CONTEXT
        num_shared = np.where(texts[:, NUM_SHARED] < 0, np.maximum(begun, 0), texts[:, NUM_SHARED])
        self.table[rows, NUM_SHARED] = num_shared
        for ends, has, start in zip(
            self._ends, (texts[:, OWN], texts[:, SHARED]), (texts[:, NUM_INDEXED], num_shared), strict=True
        ):
            waiting = np.where(has != 0, known - start, 0)
            ends[: len(rows)] = start + tokens_to_index(waiting, self._always, self._max_indexed)
        fields = self._fields
        fields[_AT["own_ends"]], fields[_AT["shared_ends"]] = (each.ctypes.data for each in self._ends)
        fields[_AT["next_row"]] = fields[_AT["num_matching"]] = 0
