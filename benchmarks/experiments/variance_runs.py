"""Workloads of experiment 1, outputs that vary more and more, and each policy's throughput on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.experiments.policies import STATIC
from benchmarks.experiments.simulated import drawn, fixed
from cadenza.loadtest.published import lognormal_text
from cadenza.loadtest.requests import Floats, Ints, RequestShape
from cadenza.loadtest.seeds import stream

MEAN = 128
"""Of the outputs in `equal_means`."""

Serve = Callable[[str, Sequence[RequestShape], int], float]
"""Tokens per second, prompts' and outputs' as the post counts them, of a policy with batches of so many."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of one place; lengths in tokens."""

    prompt_len: int
    mean: int
    """Of the exponential distribution that outputs are drawn from."""
    maxima: tuple[int, ...]
    """Draws over it are drawn again, as in the post."""
    pool_tokens: int
    num_requests: int
    """At least."""
    seeds: range

    def num_reserved(self, maximum: int) -> int:
        """Sequences whose greatest length fits in the pool."""
        return self.pool_tokens // (self.prompt_len + maximum)

    def num_loaded(self, maximum: int) -> int:
        """Requests in whole batches, as in the post: a static batch that is not full waits for ever."""
        size = self.num_reserved(maximum)
        return -(-self.num_requests // size) * size


@dataclass(frozen=True, slots=True)
class Point:
    """One workload, and what came out."""

    label: str
    num_reserved: int
    """Sequences of a batch."""
    cv: float
    """Standard deviation of the outputs over their mean."""
    longest_over_mean: float
    """Of the static batches, in their order: steps that a batch takes for each that a sequence of it needs."""
    tokens_per_s: dict[str, Floats]
    """[seeds] by policy."""

    def ratio(self, policy: str, over: str = STATIC) -> float:
        """Mean throughput over another's."""
        return float(self.tokens_per_s[policy].mean() / self.tokens_per_s[over].mean())

    def spread(self, policy: str) -> tuple[float, float]:
        """Least and greatest ratio of the runs to static batches with the same load."""
        ratios = self.tokens_per_s[policy] / self.tokens_per_s[STATIC]
        return float(ratios.min()), float(ratios.max())


def growing_maxima(scale: Scale, names: Sequence[str], serve: Serve) -> list[Point]:
    """The post's workloads: exponential outputs, cut ever later, and as large a batch as each leaves room for."""
    found = []
    for maximum in scale.maxima:
        loads = [_exponential(scale, maximum, seed) for seed in scale.seeds]
        found.append(_point(str(maximum), scale.num_reserved(maximum), loads, scale, names, serve))
    return found


def equal_means(scale: Scale, names: Sequence[str], serve: Serve, every: int = 1) -> list[Point]:
    """Outputs of one mean and one maximum, so of one batch size, and of growing variance; `every` n-th of them."""
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
