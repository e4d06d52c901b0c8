"""What does it take to look for drafts that are not there? Of the suffix source and of the control of their number.

Texts of random tokens, one more token each in every step. Between two steps other memory is written, as a model's step
does, so that the processor's caches hold little of the source.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.common.rows import OtherLoad, Row, make_row
from executor_svc.batch.slots import Slots
from executor_svc.cpu.kernels.suffixes.growth import SuffixKernels
from executor_svc.plan.limits import Limits
from executor_svc.speculation.suffix import SuffixSource
from scheduler_svc.core.lanes.draft_control import DraftControl
from scheduler_svc.core.lanes.drafted_step import DraftedStep

_PROMPT, _STEPS = 64, 400
_VOCAB, _MOST = 49_152, 5
_FLUSHED_BYTES = 16 << 20
_STEP_NS = 5_000_000


def measure(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """One row for each number of sequences."""
    for batch in options.batches:
        repeats, cores = [], []
        for index in range(options.repeats + 1):
            with OtherLoad() as other:
                found = {"source_us": _source_us(batch, options.seed + index), "control_us": _control_us(batch)}
            if index:  # the first compiles
                repeats.append(found)
                cores.append(other.cores)
        params = {"measure": "looks", "batch": batch, "steps": _STEPS, "prompt_tokens": _PROMPT}
        yield make_row(name, seed=options.seed, params=params, repeats=repeats, other_cores=cores)


def describe(row: Row) -> str:
    """One line."""
    found = row.medians
    return (
        f"{row.params['batch']} sequences without a match: a step's drafts take {found['source_us']:.1f} us on the "
        f"executor, and their number {found['control_us']:.1f} us in the core"
    )


def _source_us(batch: int, seed: int) -> float:
    """Median microseconds of a step in the source."""
    limits = Limits(batch, batch, 1024, _PROMPT + _STEPS, _VOCAB, 20, 16, 8, 0, 1, _MOST)
    slots, rng, rows = Slots(limits), random.Random(seed), np.arange(batch)
    source = SuffixSource(limits, SuffixKernels())
    for slot in range(batch):
        slots.token_ids[slot, :_PROMPT] = [rng.randrange(_VOCAB) for _ in range(_PROMPT)]
        slots.num_tokens[slot] = slots.num_prompt_tokens[slot] = _PROMPT
        source.admitted(slot, 7)
    other, times = np.zeros(_FLUSHED_BYTES // 8), []
    for _ in range(_STEPS):
        other += 1
        start = time.perf_counter()
        source.looks(slots, rows)
        times.append(time.perf_counter() - start)
        slots.token_ids[rows, slots.num_tokens] = [rng.randrange(_VOCAB) for _ in range(batch)]
        slots.num_tokens += 1
    return 1e6 * statistics.median(times)


def _control_us(batch: int) -> float:
    """Mean microseconds of a plan and a result in the control, once it knows that there are no drafts."""
    control, other, times, scopes = DraftControl(_MOST, adaptive=True), np.zeros(_FLUSHED_BYTES // 8), [], {7: batch}
    for index in range(2 * _STEPS):
        other += 1
        start = time.perf_counter()
        most = control.choose(batch, scopes)
        control.observe(DraftedStep(batch, batch if most else 0, most, 0, 0, 0, _STEP_NS + index % 7, {}))
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.mean(times[_STEPS:])
