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

Requests of a time slice, in columns.

Traffic drawn from published statistics.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from cadenza_loadtest.requests import Floats, Ints, LoadTestError
from cadenza_loadtest.seeds import stream

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


@dataclass(frozen=True, slots=True)
class Arrivals:
    """In the order of arrival; [n] each."""

    due_s: Floats
    prompt: Ints
    """Tokens of the prompt."""
    output: Ints
    """Tokens of the output, which neither routers nor schedulers know."""
    session: Ints
    """Number of the session, -1 for none; the source may use a number again when a session is over."""
    fresh: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """Whether a session begins."""
    shared: Ints
    """Tokens of the prompt that its session has had before."""
    group: Ints
    """Number of the beginning that sessions share, such as a system prompt; -1 for none."""
    group_tokens: Ints

    def __len__(self) -> int:
        return len(self.due_s)

    def select(self, rows: slice | np.ndarray[tuple[int], np.dtype[Any]]) -> Arrivals:
        """The arrivals at these indices, where a mask is true, or of a slice."""
        return Arrivals(*(getattr(self, each.name)[rows] for each in fields(self)))


def alone(due_s: Floats, prompt: Ints, output: Ints) -> Arrivals:
    """Arrivals of requests that share nothing."""
    none, nothing = np.full(len(due_s), -1), np.zeros(len(due_s), np.int64)
    return Arrivals(due_s, prompt, output, none, np.zeros(len(due_s), np.bool_), nothing, none, nothing)


def joined(parts: list[Arrivals]) -> Arrivals:
    """All of them, in the order of arrival."""
    whole = Arrivals(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Arrivals)))
    return whole.select(np.argsort(whole.due_s, kind="stable"))


class ChunkedTraffic(abc.ABC):
    """A source that makes its requests in chunks of equal time, so that they do not depend on the slices taken."""

    num_sessions: int
    """Session numbers are below this."""
    num_groups: int
    max_output: int
    """No output is longer."""

    def __init__(self, chunk_s: float) -> None:
        self.chunk_s = chunk_s
        self._chunk = 0
        self._ready = alone(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))

    def take(self, begin_s: float, end_s: float) -> Arrivals:
        """The requests that are due from `begin_s` up to, not including, `end_s`; the next call begins there."""
        parts = [self._ready]
        while self._chunk * self.chunk_s < end_s:
            parts.append(self.draw(self._chunk))
            self._chunk += 1
        if len(parts) > 1:
            self._ready = joined(parts)
        count = int(np.searchsorted(self._ready.due_s, end_s))
        now, later = slice(count), slice(count, None)
        taken, self._ready = self._ready.select(now), self._ready.select(later)
        return taken

    @abc.abstractmethod
    def draw(self, chunk: int) -> Arrivals:
        """The requests of a chunk, counted from 0; the chunks are drawn in order, each once."""


_CHUNK_S = 60.0


class DrawnTraffic(ChunkedTraffic):
    """Poisson arrivals of a mix. A request that continues another one is of its session; sessions may branch."""

    def __init__(self, name: MixName, per_s: float, seed: int, *, daily: bool = True) -> None:
        """`per_s`: requests a second, on a day's average if `daily`, else all the time."""
        super().__init__(_CHUNK_S)
        self._mix, self._per_s, self._seed, self._daily = MIXES[name], per_s, seed, daily
        following = self._mix.continuation
        peak = day_peak() if daily else 1.0
        self._num_kept = 0 if following is None else math.ceil(following.gap_s[-1] / _CHUNK_S) + 1
        expected = per_s * peak * _CHUNK_S * (self._num_kept + 1)
        self.num_sessions = 0 if following is None else round(1.2 * expected + 1000)
        self.num_groups = 1 if self._mix.beginning else 0
        self.max_output = int(max(self._mix.output[-1], following.output[-1] if following else 0))
        self._past: list[tuple[Floats, Ints]] = []
        """Times and sessions of the requests of the last chunks, the newest last."""
        self._num_begun = 0

    def draw(self, chunk: int) -> Arrivals:
        """As in ChunkedTraffic."""
        rng, begin_s = stream(self._seed, "fleet traffic", chunk), chunk * _CHUNK_S
        factor = day_factor(begin_s + _CHUNK_S / 2) if self._daily else 1.0
        count = int(rng.poisson(self._per_s * factor * _CHUNK_S))
        due_s = begin_s + np.sort(rng.random(count)) * _CHUNK_S
        prompt, output = draw(self._mix.prompt, rng, count), draw(self._mix.output, rng, count)
        nothing = np.zeros(count, np.int64)
        session, shared, fresh = np.full(count, -1), nothing, np.zeros(count, np.bool_)
        following = self._mix.continuation
        if following is not None:
            continues, gap_s = rng.random(count) < following.share, draw(following.gap_s, rng, count)
            parent, past = self._parents(chunk, due_s, continues, gap_s)
            session, fresh = self._sessions(parent, past)
            prompt = np.where(fresh, prompt, draw(following.prompt, rng, count))
            output = np.where(fresh, output, draw(following.output, rng, count))
            shared = np.where(fresh, 0.0, prompt * draw(following.same, rng, count)).astype(np.int64)
            self._past = [*self._past, (due_s, session)][-self._num_kept :]
        whole, outputs = np.maximum(1, prompt).astype(np.int64), np.maximum(1, output).astype(np.int64)
        beginning = np.minimum(whole, self._mix.beginning)
        group = nothing if self._mix.beginning else np.full(count, -1)
        return Arrivals(due_s, whole, outputs, session, fresh, np.minimum(shared, whole), group, beginning)

    def _parents(
        self, chunk: int, due_s: Floats, continues: np.ndarray[tuple[int], np.dtype[np.bool_]], gap_s: Floats
    ) -> tuple[Ints, Ints]:
        """Which request each continues: its index in this chunk, -1 for none there; its session if it is earlier."""
        parent, past = np.full(len(due_s), -1), np.full(len(due_s), -1)
        back = chunk - np.floor((due_s - gap_s) / _CHUNK_S).astype(np.int64)
        for age in np.unique(back[continues]).tolist():
            (now,) = (continues & (back == age)).nonzero()
            if age == 0:
                parent[now] = np.searchsorted(due_s, due_s[now] - gap_s[now]) - 1
            elif age <= len(self._past):
                times, sessions = self._past[-age]
                if len(times):
                    place = np.searchsorted(times, due_s[now] - gap_s[now])
                    past[now] = sessions[np.minimum(place, len(times) - 1)]
        return parent, past

    def _sessions(self, parent: Ints, past: Ints) -> tuple[Ints, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
        """The session of each request, and whether it begins."""
        fresh = (parent < 0) & (past < 0)
        session = past.copy()
        count = int(fresh.sum())
        session[fresh] = (self._num_begun + np.arange(count)) % self.num_sessions
        self._num_begun += count
        while (session < 0).any():  # a parent comes before, so each round ends some
            (open_ones,) = (session < 0).nonzero()
            session[open_ones] = session[parent[open_ones]]
        return session, fresh
