"""Prefix-heavy chat traffic: sessions of several turns that begin with one of a few system prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cadenza_loadtest.requests import RequestShape
from cadenza_loadtest.schedule import ScheduledRequest, make_schedule
from cadenza_loadtest.seeds import stream
from cadenza_loadtest.settings import make_settings


@dataclass(frozen=True, slots=True)
class Chat:
    """The lengths and shares of the traffic; lengths are in tokens, as `cadenza loadtest` writes them."""

    num_system_prompts: int = 32
    skew: float = 1.0
    """The k-th system prompt has a weight of 1/k^skew."""
    system_tokens: tuple[int, int] = (300, 2000)
    """Shortest and longest system prompt."""
    num_turns: str = "uniform:2:8"
    input_len: str = "exponential:100:10:1000"
    output_len: str = "exponential:200:10:1000"
    think_s: float = 10.0
    """Mean time between an answer and the next turn."""

    def schedule(self, sessions_per_s: float, seconds: float, seed: int) -> Iterator[ScheduledRequest]:
        """Sessions in a Poisson process, each with its system prompt before the first turn."""
        settings = make_settings(
            {
                "workload": "multi-turn",
                "request_rate": sessions_per_s,
                "num_requests": math.ceil(sessions_per_s * seconds),
                "num_turns": self.num_turns,
                "input_len": self.input_len,
                "output_len": self.output_len,
                "think_s": self.think_s,
            }
        )
        rng = stream(seed, "system prompts")
        lengths = rng.integers(*self.system_tokens, self.num_system_prompts, endpoint=True)
        weights = np.cumsum(np.arange(1, self.num_system_prompts + 1) ** -self.skew)
        for due_s, shape in make_schedule(settings, seed):
            if shape.turn:
                yield due_s, shape
                continue
            prefix = int(np.searchsorted(weights[:-1], rng.random() * weights[-1]))
            yield due_s, _with_prefix(shape, prefix, int(lengths[prefix]))


def _with_prefix(shape: RequestShape, prefix: int, length: int) -> RequestShape:
    num_tokens = shape.num_prompt_tokens + length
    return replace(shape, num_prompt_tokens=num_tokens, prefix=prefix, num_prefix_tokens=length)
