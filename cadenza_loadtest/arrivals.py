"""Arrival processes, drawn before the run, so that a slow server cannot slow its own load."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.seeds import check_seed, stream

PROCESSES = ("poisson", "gamma", "constant")
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process; `make_arrivals` checks its parameters.

    Gaps between arrivals are independent. poisson: exponential gaps. gamma: gamma distributed gaps of shape
    `burstiness`, as in vLLM's benchmark (`--burstiness`, https://docs.vllm.ai/en/latest/cli/bench/serve/): 1 is
    Poisson, below 1 is bursty, above 1 is more even; the gaps' coefficient of variation is 1/sqrt(burstiness).
    constant: equal gaps. A rate of inf: all requests at once, for every process.
    """

    process: str
    rate: float
    """Per second."""
    burstiness: float = 1.0

    def times(self, seed: int) -> Iterator[float]:
        """Endless arrival times in seconds from the start, never decreasing; the first follows the first gap, or is 0
        for inf.

        The times depend on the seed alone, not on how many are taken.
        """
        check_seed(seed)
        if math.isinf(self.rate):
            return itertools.repeat(0.0)
        if self.process == "constant":
            return (count / self.rate for count in itertools.count(1))
        return self._random_times(seed)

    def scaled(self, rate: float) -> Arrivals:
        """The same process at another rate: with the same seed, the same pattern stretched or compressed."""
        return make_arrivals(self.process, rate, burstiness=self.burstiness)

    def _random_times(self, seed: int) -> Iterator[float]:
        rng = stream(seed, "arrivals")
        last = 0.0
        while True:
            # The mean is 1, so that the rate only scales the gaps; a gamma of shape 1 is the exponential distribution.
            gaps = rng.standard_gamma(self.burstiness, _CHUNK) / self.burstiness
            # `last` goes into the sum instead of being added afterwards, so that rounding does not depend on where a
            # chunk ends.
            gaps[0] += last
            times = np.cumsum(gaps)
            last = float(times[-1])
            yield from (times / self.rate).tolist()


def make_arrivals(process: str, rate: float, *, burstiness: float = 1.0) -> Arrivals:
    """Arrivals by `process` (one of PROCESSES) at an average `rate` per second; inf: all at once.

    Raises a LoadTestError that names the option.
    """
    if process not in PROCESSES:
        raise LoadTestError(f"--arrivals {process}: must be one of {', '.join(PROCESSES)}")
    if not rate > 0:
        raise LoadTestError(f"--request-rate {rate}: must be over 0 requests a second, or inf for all at once")
    if not 0 < burstiness < math.inf:
        raise LoadTestError(f"--burstiness {burstiness}: must be a number over 0; 1 is Poisson, below 1 is bursty")
    if process != "gamma" and burstiness != 1:
        raise LoadTestError(f"--burstiness {burstiness}: goes with --arrivals gamma only, not {process}")
    return Arrivals(process, float(rate), float(burstiness))
