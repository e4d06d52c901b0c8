"""Loads of experiment 2: Poisson arrivals at growing rates, and each policy's latencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from benchmarks.experiments.policies import policies
from benchmarks.experiments.simulated import drawn, poisson
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.latencies import end_of, per_request
from cadenza_loadtest.requests import Floats, RequestShape

SHARES = np.arange(1, 100) / 100
"""Percentiles at which distributions are compared."""

Load = Callable[[Sequence[RequestShape], Sequence[float]], RequestColumns]
Serving = Callable[[str], AbstractContextManager[Load]]
"""A server with the options of a policy, for any number of loads."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes for one place; lengths in the form of `--input-len`."""

    input_len: str
    output_len: str
    num_requests: int
    seeds: range


@dataclass(frozen=True, slots=True)
class Latencies:
    """Results of one policy at one rate."""

    e2e_s: tuple[Floats, ...]
    """[requests] for each seed."""
    tokens_per_s: float
    """Prompt and output tokens per second, from the first request to the last token, over the seeds."""

    def quantile(self, share: float) -> float:
        """A quantile over the requests of all seeds, in seconds."""
        return float(np.quantile(np.concatenate(self.e2e_s), share))

    def quantiles(self) -> Floats:
        """[99] the quantiles at SHARES, in seconds."""
        found: Floats = np.quantile(np.concatenate(self.e2e_s), SHARES)
        return found

    def ratios(self, other: Latencies, share: float) -> list[float]:
        """[seeds] the ratio of this quantile to the other's, each under the same load."""
        pairs = zip(self.e2e_s, other.e2e_s, strict=True)
        return [float(np.quantile(one, share) / np.quantile(two, share)) for one, two in pairs]


def at_rates(scale: Scale, rates: Sequence[float], serving: Serving) -> dict[float, dict[str, Latencies]]:
    """Latencies by rate (requests per second), then by policy."""
    found: dict[float, dict[str, Latencies]] = {rate: {} for rate in rates}
    for policy in policies(1):
        with serving(policy) as load:
            for rate in rates:
                found[rate][policy] = _latencies([_loaded(scale, rate, seed, load) for seed in scale.seeds])
    return found


def requests_of(scale: Scale, seed: int) -> list[RequestShape]:
    """The requests, which are the same at every rate."""
    return drawn({"input_len": scale.input_len, "output_len": scale.output_len}, scale.num_requests, seed)


def _loaded(scale: Scale, rate: float, seed: int, load: Load) -> RequestColumns:
    return load(requests_of(scale, seed), poisson(rate, scale.num_requests, seed))


def _latencies(runs: Sequence[RequestColumns]) -> Latencies:
    tokens = sum(int((run.num_prompt_tokens + run.num_output_tokens).sum()) for run in runs)
    seconds = sum(end_of(run) - float(run.due_s.min()) for run in runs)
    return Latencies(tuple(per_request(run)["e2e_s"] for run in runs), tokens / seconds)
