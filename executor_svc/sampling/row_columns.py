"""The sampling parameters of the slots that sample, as columns with a row for each."""

from __future__ import annotations

import numpy as np

from executor_svc.batch.slots import Scheduled, Slots
from executor_svc.plan.plan import IntArray
from executor_svc.sampling.candidates import CandidateColumns
from executor_svc.sampling.logits_edits import logits_edits
from executor_svc.sampling.sampler import SamplingColumns


def sampling_columns(slots: Slots, scheduled: Scheduled) -> SamplingColumns:
    """Parameters of the slots that sample a token, in columns, slots ascending; before `commit`."""
    rows, sources, sampling = scheduled.sampling_slots, scheduled.sources, slots.sampling
    if len(scheduled.candidates):
        sources = np.delete(_sources(scheduled), scheduled.candidates)
        rows = np.delete(rows, scheduled.candidates)
    return SamplingColumns(
        temperature=sampling.temperature[rows],
        top_p=sampling.top_p[rows],
        top_k=sampling.top_k[rows],
        log_min_p=sampling.log_min_p[rows],
        seed=sampling.seed[rows],
        sample_index=sampling.sample_index[rows],
        position=slots.num_tokens[rows],
        num_logprobs=sampling.num_logprobs[rows],
        edits=logits_edits(slots, rows),
        sources=sources,
    )


def candidate_columns(slots: Slots, scheduled: Scheduled) -> CandidateColumns:
    """What the slots that have candidates told ask for [C], slots ascending; before `commit`."""
    rows = scheduled.sampling_slots[scheduled.candidates]
    return CandidateColumns(
        sources=_sources(scheduled)[scheduled.candidates],
        num_candidates=slots.sampling.num_candidates[rows],
        edits=logits_edits(slots, rows),
    )


def _sources(scheduled: Scheduled) -> IntArray:
    """[R] the logits row that each of sampling_slots reads, spelled out."""
    return np.arange(len(scheduled.sampling_slots)) if scheduled.sources is None else scheduled.sources
