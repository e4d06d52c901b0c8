"""All experiments, in the order of the page."""

from __future__ import annotations

from benchmarks.experiments import (
    chunked_prefill,
    memory,
    pipelining,
    poisson,
    preemption,
    served_ratio,
    sharing,
    speculation,
    variance,
)
from benchmarks.experiments.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = tuple(
    module.EXPERIMENT
    for module in (
        variance,
        poisson,
        memory,
        sharing,
        chunked_prefill,
        preemption,
        served_ratio,
        pipelining,
        speculation,
    )
)
