"""What drafts may gain on this machine: measured times of steps with more rows, and acceptances as given.

With a draft right with probability a, independently of the others, a step with k drafts gives (1 - a^(k+1)) / (1 - a)
tokens (Leviathan et al., arXiv 2211.17192, equation 1). It takes the time of a step with k + 1 rows for each sequence.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.forward_step import make_runner, step_batch

StepTimes = Mapping[tuple[int, int], float]
"""Seconds of a step by number of sequences and of drafts for each."""


def tokens_per_step(acceptance: float, num_drafts: int) -> float:
    """Expected tokens of a sequence in a step with so many drafts."""
    return sum(acceptance**index for index in range(num_drafts + 1))


def allowed_gain(times: StepTimes, batch: int, acceptance: float, num_drafts: int) -> float:
    """Multiple of the tokens per second without drafts."""
    return tokens_per_step(acceptance, num_drafts) * times[batch, 0] / times[batch, num_drafts]


def best_num_drafts(times: StepTimes, batch: int, acceptance: float) -> int:
    """The number of drafts that allows the greatest gain; 0 if none allows any."""
    return max((k for b, k in times if b == batch), key=lambda k: allowed_gain(times, batch, acceptance, k))


def measure_steps(
    model: Path, cases: Sequence[tuple[int, int]], context: int, rounds: int, options: Mapping[str, Any]
) -> dict[tuple[int, int], float]:
    """Median seconds of a step of each case: sequences and drafts; all in turns, in this process without services.

    A step runs the model over the last token and the drafts of each sequence behind `context` tokens, with logits of
    all of them.
    """
    runner = make_runner(model, None, more=options).runner
    batches = {}
    for batch, num_drafts in cases:
        made = step_batch([(context, 1 + num_drafts)] * batch)
        batches[batch, num_drafts] = replace(made, logits_rows=torch.arange(batch * (1 + num_drafts)))
    seconds: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for index in range(rounds + 1):
        for case, batch_of in batches.items():
            start = time.perf_counter()
            runner.argmax(runner.logits(runner.forward(batch_of), batch_of.logits_rows))
            if index:  # the first round warms up
                seconds[case].append(time.perf_counter() - start)
    return {case: statistics.median(found) for case, found in seconds.items()}
