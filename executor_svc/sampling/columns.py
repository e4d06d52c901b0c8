"""The sampling parameters of the rows of a step, in columns, gathered from the slots that sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cadenza_common.plan.sampling import Need
from executor_svc.batch.scheduled import SampledRows, Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray
from executor_svc.sampling.candidates import CandidateColumns
from executor_svc.sampling.logits_edits import LogitsEdits, logits_edits
from executor_svc.sampling.masks import RowMasks

SAMPLER_NEEDS = (Need.DRAW, Need.FLOOR, Need.SEARCH, Need.REPORT)
"""The sampler has a column for each parameter with one of these needs."""


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Sampling parameters of R rows, in columns."""

    numbers: Mapping[str, Any]
    """[R] each: the columns of the table (`plan.sampling`) that have SAMPLER_NEEDS, by name."""
    position: IntArray
    """[R] position of the token to be chosen."""
    edits: LogitsEdits | None = None
    """Changes to the logits of some rows."""
    sources: IntArray | None = None
    """[R] the logits row that each row reads, in any order; None: its own."""

    def __getitem__(self, name: str) -> Any:
        """Return the column [R] of this name."""
        return self.numbers[name]

    def take(self, rows: IntArray) -> SamplingColumns:
        """Return the columns of these rows, for filters and draws: without edits and sources."""
        return SamplingColumns({name: values[rows] for name, values in self.numbers.items()}, self.position[rows])


def sampling_columns(slots: Slots, scheduled: Scheduled, masks: RowMasks | None = None) -> SamplingColumns:
    """Return the parameters of the rows that sample a token, in columns, slots ascending; before `commit`.

    masks: of the grammars of scheduled.rows.
    """
    rows = scheduled.rows
    if len(rows.candidates):
        drawn = np.delete(np.arange(len(rows.slots)), rows.candidates)
        rows, masks = rows.take(drawn), None if masks is None else masks.take(drawn)
    return row_columns(slots, rows, masks)


def row_columns(slots: Slots, rows: SampledRows, masks: RowMasks | None = None) -> SamplingColumns:
    """Return the parameters of rows without candidates, in columns; before `commit`. masks: of these rows."""
    return SamplingColumns(
        numbers=slots.sampling.rows(rows.slots, *SAMPLER_NEEDS),
        position=slots.num_tokens[rows.slots] + (0 if rows.ahead is None else rows.ahead),
        edits=logits_edits(slots, rows.slots, rows.ahead, masks),
        sources=rows.sources,
    )


def candidate_columns(slots: Slots, scheduled: Scheduled, masks: RowMasks | None = None) -> CandidateColumns:
    """Return the parameters of the slots that requested candidates [C], slots ascending; before `commit`.

    masks: of the grammars of scheduled.rows.
    """
    rows, which = scheduled.rows, scheduled.rows.candidates
    chosen = rows.slots[which]
    return CandidateColumns(
        sources=which if rows.sources is None else rows.sources[which],
        num_candidates=slots.sampling["num_candidates"][chosen],
        edits=logits_edits(slots, chosen, masks=None if masks is None else masks.take(which)),
    )
