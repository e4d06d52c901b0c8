"""Published statistics of traffic, from which a day is drawn where no trace is given.

Lengths are quantiles (`LEVELS`) of the public traces' own files, computed for this page:

- Mooncake's conversation trace (an hour of Kimi, 12,031 requests of 12,035 prompt and 343 output tokens on average):
  github.com/kvcache-ai/Mooncake at 3b5a594133958449a1feaf1c9e0fc1b553e34a28,
  FAST25-release/traces/conversation_trace.jsonl (Apache 2.0; Qin et al., FAST 2025). All requests begin with the same
  512 tokens. A request continues another one if it begins with over 512 tokens of it: 38.7% do. Quantiles of the time
  since that other one, and of the share of the prompt that is the same.
- Azure's conversation and code traces of 2023 (19,366 and 8,819 requests of 1,155 and 2,048 prompt and 211 and 28
  output tokens on average): github.com/Azure/AzurePublicDataset at b469a113cedca53ddc3bdea71a143dc4b7d8700c,
  data/AzureLLMInferenceTrace_{conv,code}.csv (CC-BY; Patel et al., Splitwise, ISCA 2024). Nothing is known of what
  their prompts share.

The day: a weekday of Azure's conversation trace of 2024, read off the published histogram of its 27.3 million requests
(bins of 4.2 hours, 14 May 2024: analysis/AzureLLMInferenceDataset2024.ipynb there; Stojkovic et al., DynamoLLM, HPCA
2025). Assumed: Poisson arrivals at that rate; outputs that do not depend on prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from cadenza_loadtest.requests import Floats, LoadTestError

DAY_S = 86400.0
LEVELS = (*(place / 20 for place in range(20)), 0.98, 0.99, 0.995, 1.0)
_DAY = (0.70, 0.69, 0.855, 0.99, 0.975, 0.73)
"""Million requests in each bin of a weekday, from midnight on."""

MixName = Literal["mooncake-conversation", "azure-conversation", "azure-code"]


@dataclass(frozen=True, slots=True)
class Continuation:
    """Requests that continue earlier ones."""

    share: float
    """Of all requests."""
    prompt: tuple[float, ...]
    output: tuple[float, ...]
    same: tuple[float, ...]
    """Share of the prompt that is the same."""
    gap_s: tuple[float, ...]
    """Since the other one."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Quantiles of requests at LEVELS."""

    prompt: tuple[float, ...]
    output: tuple[float, ...]
    beginning: int = 0
    """Tokens with which all prompts begin."""
    continuation: Continuation | None = None


MIXES: dict[MixName, Mix] = {
    "mooncake-conversation": Mix(
        prompt=(
                891, 897, 905, 943, 1092, 1336, 1756, 2767, 3914, 4587, 5264, 6191, 7417, 8828, 10775, 13056, 15871,
                19453, 25561, 38538, 67212, 89869, 111800, 126195,
            ),
        output=(
                1, 9, 22, 40, 97, 155, 214, 257, 293, 323, 351, 374, 398, 419, 445, 467, 499, 538, 585, 674, 836,
                1019, 1235, 2000,
            ),
        beginning=512,
        continuation=Continuation(
            share=4658 / 12031,
            prompt=(
                892, 1627, 2101, 2663, 3453, 4530, 5501, 6504, 7507, 8736, 9872, 11196, 12556, 14315, 15782, 17656,
                20235, 24342, 28963, 40994, 65889, 79183, 94909, 123194,
            ),
            output=(
                1, 13, 29, 57, 104, 159, 212, 253, 287, 320, 348, 375, 401, 426, 453, 479, 513, 552, 618, 739, 965,
                1338, 1992, 2000,
            ),
            same=(
                0.015, 0.149, 0.288, 0.435, 0.519, 0.587, 0.652, 0.709, 0.765, 0.81, 0.847, 0.879, 0.905, 0.923,
                0.937, 0.951, 0.961, 0.971, 0.981, 0.99, 1.0, 1.0, 1.0, 1.0,
            ),
            gap_s=(
                0, 30, 42, 51, 60, 66, 75, 84, 96, 108, 123, 138, 162, 189, 222, 264, 318, 390, 483, 618, 1032,
                1482, 1908, 3030,
            ),
        ),
    ),
    "azure-conversation": Mix(
        prompt=(
                2, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130, 1189, 1315, 1877,
                2735, 4083, 4098, 4142, 4831, 14050,
            ),
        output=(
                7, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451, 540, 601,
                644, 1000,
            ),
    ),
    "azure-code": Mix(
        prompt=(
                3, 75, 147, 232, 385, 578, 770, 938, 1075, 1261, 1469, 1690, 1909, 2164, 2433, 2745, 3193, 3923,
                5194, 7315, 7436, 7436, 7436, 7437,
            ),
        output=(
                6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24, 29, 39, 55, 90, 172, 252, 361, 1899,
            ),
    ),
}  # fmt: skip


def draw(quantiles: tuple[float, ...], rng: np.random.Generator, count: int) -> Floats:
    """[count] values whose distribution has these quantiles, linear between them."""
    return np.interp(rng.random(count), LEVELS, quantiles)


def day_factor(at_s: float) -> float:
    """The rate at this time over the day's mean."""
    width = DAY_S / len(_DAY)
    centres = (np.arange(-1, len(_DAY) + 1) + 0.5) * width
    values = (_DAY[-1], *_DAY, _DAY[0])
    return float(np.interp(at_s % DAY_S, centres, values)) / (sum(_DAY) / len(_DAY))


def day_peak() -> float:
    """The largest `day_factor`."""
    return max(_DAY) / (sum(_DAY) / len(_DAY))


def read_mix(text: str) -> MixName:
    """Check a mix's name; raises LoadTestError."""
    for name in MIXES:
        if text == name:
            return name
    raise LoadTestError(f"--traffic {text}: must be one of {', '.join(MIXES)}, or the file of a trace")
