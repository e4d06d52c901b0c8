"""Workloads of experiment 1, with increasingly varied outputs, and each policy's throughput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.experiments.policies import STATIC
from benchmarks.experiments.simulated import drawn, fixed
from cadenza_loadtest.requests import Floats, Ints, RequestShape
from cadenza_loadtest.seeds import stream
from cadenza_loadtest.workloads.published import lognormal_text

MEAN = 128
"""Mean of the outputs in `equal_means`."""

Serve = Callable[[str, Sequence[RequestShape], int], float]
"""Tokens per second (prompts and outputs, as in the post) of a policy, from policy, requests and batch size."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes for one place; lengths are in tokens."""

    prompt_len: int
    mean: int
    """Mean of the exponential distribution of outputs."""
    maxima: tuple[int, ...]
    """Limits of the outputs; larger draws are redrawn, as in the post."""
    pool_tokens: int
    num_requests: int
    """Minimum number of requests."""
    seeds: range

    def num_reserved(self, maximum: int) -> int:
        """Number of sequences whose greatest length fits in the pool."""
        return self.pool_tokens // (self.prompt_len + maximum)

    def num_loaded(self, maximum: int) -> int:
        """Number of requests in whole batches, as in the post: an incomplete static batch waits forever."""
        size = self.num_reserved(maximum)
        return -(-self.num_requests // size) * size


@dataclass(frozen=True, slots=True)
class Point:
    """Results for one workload."""

    label: str
    num_reserved: int
    """Sequences in a batch."""
    cv: float
    """Standard deviation of the outputs over their mean."""
    longest_over_mean: float
    """Longest output over the mean in static batches: steps of a batch for each step that a sequence needs."""
    tokens_per_s: dict[str, Floats]
    """[seeds] by policy."""

    def ratio(self, policy: str, over: str = STATIC) -> float:
        """Ratio of the mean throughput to another policy's."""
        return float(self.tokens_per_s[policy].mean() / self.tokens_per_s[over].mean())

    def spread(self, policy: str) -> tuple[float, float]:
        """Minimum and maximum over the runs of the ratio to static batches with the same load."""
        ratios = self.tokens_per_s[policy] / self.tokens_per_s[STATIC]
        return float(ratios.min()), float(ratios.max())


def growing_maxima(scale: Scale, names: Sequence[str], serve: Serve) -> list[Point]:
    """The post's workloads: exponential outputs with increasing limits, each with the largest batch that fits."""
    found = []
    for maximum in scale.maxima:
        loads = [_exponential(scale, maximum, seed) for seed in scale.seeds]
        found.append(_point(str(maximum), scale.num_reserved(maximum), loads, scale, names, serve))
    return found


def equal_means(scale: Scale, names: Sequence[str], serve: Serve, every: int = 1) -> list[Point]:
    """Outputs of equal mean and maximum, hence equal batch size, and of growing variance; every `every`-th workload."""
    maximum = scale.maxima[-1]
    lengths = [
        ("constant", str(MEAN)),
        ("uniform 64 to 192", "uniform:64:192"),
        ("uniform 1 to 255", "uniform:1:255"),
        ("exponential", f"exponential:{MEAN}:1:{maximum}"),
        ("log-normal, σ = 1.2", lognormal_text(MEAN, 1.2, 1, maximum)),
        ("log-normal, σ = 1.6", lognormal_text(MEAN, 1.6, 1, maximum)),
    ]
    found = []
    for label, text in lengths[::every]:
        loads = [_drawn(scale, text, seed) for seed in scale.seeds]
        found.append(_point(label, scale.num_reserved(maximum), loads, scale, names, serve))
    return found


def _exponential(scale: Scale, maximum: int, seed: int) -> Ints:
    rng = stream(seed, f"experiment-1 {maximum}")
    count, draws = scale.num_loaded(maximum), np.zeros(0, np.int64)
    while len(draws) < count:
        more = np.rint(rng.exponential(scale.mean, 2 * count)).astype(np.int64)
        draws = np.concatenate((draws, more[(more >= 1) & (more <= maximum)]))
    return draws[:count]


def _drawn(scale: Scale, lengths: str, seed: int) -> Ints:
    shapes = drawn(
        {"input_len": str(scale.prompt_len), "output_len": lengths}, scale.num_loaded(scale.maxima[-1]), seed
    )
    return np.array([shape.num_output_tokens for shape in shapes])


def _point(label: str, size: int, loads: Sequence[Ints], scale: Scale, names: Sequence[str], serve: Serve) -> Point:
    requests = [fixed([scale.prompt_len] * len(load), load.tolist()) for load in loads]
    rates = {name: np.array([serve(name, shapes, size) for shapes in requests]) for name in names}
    outputs = np.concatenate(loads)
    longest = [load[first : first + size].max() for load in loads for first in range(0, len(load), size)]
    mean = float(outputs.mean())
    return Point(label, size, float(outputs.std()) / mean, float(np.mean(longest)) / mean, rates)
