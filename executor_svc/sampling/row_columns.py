"""The sampling parameters of the slots that sample, as columns with a row for each."""

from __future__ import annotations

import numpy as np

from executor_svc.batch.slots import Scheduled, Slots
from executor_svc.plan.arrays import IntArray
from executor_svc.sampling.candidates import CandidateColumns
from executor_svc.sampling.logits_edits import logits_edits
from executor_svc.sampling.sampler import SAMPLER_NEEDS, SamplingColumns


def sampling_columns(slots: Slots, scheduled: Scheduled) -> SamplingColumns:
    """Parameters of the slots that sample a token, in columns, slots ascending; before `commit`."""
    rows, sources, sampling = scheduled.sampling_slots, scheduled.sources, slots.sampling
    if len(scheduled.candidates):
        sources = np.delete(_sources(scheduled), scheduled.candidates)
        rows = np.delete(rows, scheduled.candidates)
    return SamplingColumns(
        numbers=sampling.rows(rows, *SAMPLER_NEEDS),
        position=slots.num_tokens[rows],
        edits=logits_edits(slots, rows),
        sources=sources,
    )


def candidate_columns(slots: Slots, scheduled: Scheduled) -> CandidateColumns:
    """What the slots that have candidates told ask for [C], slots ascending; before `commit`."""
    rows = scheduled.sampling_slots[scheduled.candidates]
    return CandidateColumns(
        sources=_sources(scheduled)[scheduled.candidates],
        num_candidates=slots.sampling["num_candidates"][rows],
        edits=logits_edits(slots, rows),
    )


def _sources(scheduled: Scheduled) -> IntArray:
    """[R] the logits row that each of sampling_slots reads, spelled out."""
    return np.arange(len(scheduled.sampling_slots)) if scheduled.sources is None else scheduled.sources
