"""Distributions of prompt and output lengths in tokens, parsed from short texts such as `uniform:16:256`.

Some have published parameters.

ShareGPT, users' conversations with ChatGPT: the PagedAttention paper prints for its workload a mean input of 161.31
tokens and a mean output of 337.99 (Kwon et al., SOSP 2023, figure 11 in section 6.1, https://arxiv.org/abs/2309.06180;
its text states 8.4 and 5.8 times Alpaca's means, which are 19.31 and 58.45). vLLM's benchmark leaves out requests with
a prompt or an output of under 4 tokens, a prompt of over 1,024, or over 2,048 tokens together
(`benchmarks/benchmark_serving.py` in https://github.com/vllm-project/vllm).

The two means and the limits are published. The following is assumed: both lengths are log-normal; the standard
deviations of the logarithm, chosen for a long tail; outputs do not depend on inputs; an output has at most 1,024
tokens, so that no request has over 2,048 tokens together.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np

from cadenza_loadtest.requests import Floats, Ints, LoadTestError

FORMS = (
    "128, uniform:LOW:HIGH, exponential:MEAN[:LOW:HIGH], lognormal:MEAN:SIGMA[:LOW:HIGH] or normal:MEAN:STD[:LOW:HIGH]"
)
"""The forms that parse_lengths accepts, for help and errors."""
_MOST = 2**31 - 1
"""Upper limit of a draw without HIGH: no server accepts more, and it fits every integer type."""
_STANDARD = NormalDist()
SHAREGPT_MEAN_INPUT = 161.31
SHAREGPT_MEAN_OUTPUT = 337.99
_SHAREGPT_SIGMA_INPUT, _SHAREGPT_SIGMA_OUTPUT = 1.6, 0.8
_SHAREGPT_SHORTEST, _SHAREGPT_LONGEST = 4, 1024


class Lengths(Protocol):
    """A distribution of token counts, at least 1 each."""

    @property
    def mean(self) -> float:
        """Mean of the clipped draws; it ignores rounding to whole tokens, which matters only below about 5 tokens."""

    @property
    def max(self) -> int | None:
        """The largest possible draw; None without a limit."""

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """[count] token counts."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always `length`."""

    length: int

    @property
    def mean(self) -> float:
        return float(self.length)

    @property
    def max(self) -> int | None:
        return self.length

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        return np.full(count, self.length, np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole number from `low` to `high`, both included."""

    low: int
    high: int

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    @property
    def max(self) -> int | None:
        return self.high

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        return rng.integers(self.low, self.high, count, dtype=np.int64, endpoint=True)


@dataclass(frozen=True, slots=True)
class Clipped(abc.ABC):
    """A continuous distribution, clipped to `low` and `high` (None: no limit) and rounded to whole numbers."""

    center: float
    """Mean before clipping."""
    low: int
    high: int | None

    @property
    def max(self) -> int | None:
        return self.high

    @property
    def mean(self) -> float:
        # E[clip(X)] = low + E[min(X, high)] - E[min(X, low)]
        top = self.center if self.high is None else self._mean_below(self.high)
        return self.low + top - self._mean_below(self.low)

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        high = _MOST if self.high is None else self.high
        return np.rint(np.clip(self._floats(rng, count), self.low, high)).astype(np.int64)

    @abc.abstractmethod
    def _floats(self, rng: np.random.Generator, count: int) -> Floats:
        """[count] draws before clipping."""

    @abc.abstractmethod
    def _mean_below(self, limit: float) -> float:
        """E[min(X, limit)], before clipping."""


@dataclass(frozen=True, slots=True)
class Exponential(Clipped):
    """Exponential lengths; `center` is the mean before clipping."""

    def _floats(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.exponential(self.center, count)

    def _mean_below(self, limit: float) -> float:
        return -self.center * math.expm1(-limit / self.center)


@dataclass(frozen=True, slots=True)
class LogNormal(Clipped):
    """Log-normal lengths; `center` is the lengths' own mean, `sigma` the standard deviation of their natural log."""

    sigma: float

    @property
    def mu(self) -> float:
        """Mean of the logarithm: E[X] = exp(mu + sigma²/2)."""
        return math.log(self.center) - self.sigma**2 / 2

    def _floats(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.lognormal(self.mu, self.sigma, count)

    def _mean_below(self, limit: float) -> float:
        z = (math.log(limit) - self.mu) / self.sigma
        return self.center * _STANDARD.cdf(z - self.sigma) + limit * _STANDARD.cdf(-z)


@dataclass(frozen=True, slots=True)
class Normal(Clipped):
    """Normal lengths; `center` and `std` in tokens, before clipping."""

    std: float

    def _floats(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.normal(self.center, self.std, count)

    def _mean_below(self, limit: float) -> float:
        z = (limit - self.center) / self.std
        return self.center * _STANDARD.cdf(z) - self.std * _STANDARD.pdf(z) + limit * _STANDARD.cdf(-z)


def parse_lengths(text: str, option: str) -> Lengths:
    """The distribution that `text` describes, in one of FORMS.

    Draws are at least 1, and clipped (not redrawn) to LOW and HIGH if these are given. Raises a LoadTestError that
    names `option`, such as `--input-len`.
    """
    try:
        return lengths_of(text)
    except ValueError as error:
        raise LoadTestError(f"{option} {text}: {error}") from None


def lengths_of(text: str) -> Lengths:
    """As parse_lengths, for callers that name the option themselves; raises ValueError with the problem."""
    name, *values = text.strip().split(":")
    if name == "uniform":
        if len(values) != 2:
            raise ValueError("uniform takes LOW and HIGH, as in uniform:16:256")
        return Uniform(*_range(values))
    if name == "exponential":
        low, high = _limits(values, 1, "exponential takes MEAN, or MEAN, LOW and HIGH, as in exponential:64:8:256")
        return Exponential(positive(values[0], "MEAN"), low, high)
    if name == "lognormal":
        low, high = _limits(
            values, 2, "lognormal takes MEAN and SIGMA (of the logarithm), as in lognormal:300:1:4:2048"
        )
        return LogNormal(positive(values[0], "MEAN"), low, high, positive(values[1], "SIGMA"))
    if name == "normal":
        low, high = _limits(values, 2, "normal takes MEAN and STD, as in normal:256:64:1:1024")
        return Normal(positive(values[0], "MEAN"), low, high, positive(values[1], "STD"))
    if values or not name.isascii() or not name.isdigit():
        raise ValueError(f"must be a number of tokens or a distribution: {FORMS}")
    return Fixed(_whole(name, "the length"))


def _limits(values: list[str], num_own: int, usage: str) -> tuple[int, int | None]:
    """LOW and HIGH, which may follow the distribution's own values."""
    if len(values) == num_own:
        return 1, None
    if len(values) != num_own + 2:
        raise ValueError(usage)
    return _range(values[num_own:])


def _range(values: list[str]) -> tuple[int, int]:
    low, high = _whole(values[0], "LOW"), _whole(values[1], "HIGH")
    if low > high:
        raise ValueError(f"LOW {low} is over HIGH {high}")
    return low, high


def _whole(text: str, name: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number of tokens, not {text!r}") from None
    if not 1 <= number <= _MOST:
        raise ValueError(f"{name} must be from 1 to {_MOST} tokens, not {number}")
    return number


def positive(text: str, name: str) -> float:
    """A finite number over 0; raises a ValueError that names `name`."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, not {text!r}") from None
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be over 0, not {text}")
    return number


def sharegpt_lengths() -> tuple[str, str]:
    """Prompt and output lengths in the form of `parse_lengths`."""
    return (
        lognormal_text(SHAREGPT_MEAN_INPUT, _SHAREGPT_SIGMA_INPUT, _SHAREGPT_SHORTEST, _SHAREGPT_LONGEST),
        lognormal_text(SHAREGPT_MEAN_OUTPUT, _SHAREGPT_SIGMA_OUTPUT, _SHAREGPT_SHORTEST, _SHAREGPT_LONGEST),
    )


def lognormal_text(mean: float, sigma: float, low: int, high: int) -> str:
    """Log-normal lengths whose mean after clipping to low and high is `mean`; low < mean < high."""
    from scipy.optimize import brentq

    def too_large(center: float) -> float:
        return LogNormal(center, low, high, sigma).mean - mean

    # Clipping at 1,024 takes less than all but a small part of the mean: a center 1,000 times `high` clips all of it.
    center = float(brentq(too_large, mean / 1000, high * 1000.0))
    return f"lognormal:{center:.6g}:{sigma:g}:{low}:{high}"
