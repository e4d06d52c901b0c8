"""How long do requests wait for their first token on several executors, by the policy that places them?

Prefix-heavy chat traffic in virtual time: sessions begin with one of a few system prompts, some of which are much more
frequent than others, and have several turns, each after a think time. The policies are the scheduler's own two, and
those of llm-d's and SGLang's routers (`cadenza.simulate.placement`). Loads are shares of the highest rate that the
fleet holds under round robin. `--tokens` compares the tokens of two executors with those of one.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.rows import BenchmarkError, Row, make_row
from cadenza.loadtest.prompts import Prompts
from cadenza.loadtest.requests import RequestShape
from cadenza.loadtest.schedule import ScheduledRequest, make_schedule
from cadenza.loadtest.seeds import stream
from cadenza.loadtest.settings import make_settings
from cadenza.simulate.executor_profiles import ExecutorProfile
from cadenza.simulate.options import scheduler_config
from cadenza.simulate.placement import PLACEMENTS, PlacementName
from cadenza.simulate.published import A100_40GB, LLAMA_3_1_8B, published_profile
from cadenza.simulate.run import Outcome, Simulation
from cadenza.simulate.traffic import Traffic

NAME = "placement"
WARM_UP_S, COUNTED_S = 60.0, 120.0
"""Arrivals in this time do not count, and then those in this time do; the load goes on until they have ended."""
LOADS = (0.6, 0.75, 0.9)
_PROFILE = published_profile(A100_40GB, LLAMA_3_1_8B, max_num_seqs=256, max_num_batched_tokens=2048).model_copy(
    update={"name": "a100-40gb-llama-3.1-8b"}
)
_MAX_QUEUE_S = 1.0
"""A rate holds if the median request of the last third waits less for its admission."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """The traffic of one kind."""

    num_system_prompts: int = 32
    skew: float = 1.0
    """The k-th system prompt has a weight of 1/k^skew."""
    system_tokens: tuple[int, int] = (300, 2000)
    """Shortest and longest system prompt."""
    num_turns: str = "uniform:2:8"
    input_len: str = "exponential:100:10:1000"
    output_len: str = "exponential:200:10:1000"
    think_s: float = 10.0

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
        weights = np.arange(1, self.num_system_prompts + 1) ** -self.skew
        shares = np.cumsum(weights / weights.sum())
        for due_s, shape in make_schedule(settings, seed):
            yield (
                due_s,
                shape if shape.turn else _with_prefix(shape, int(np.searchsorted(shares, rng.random())), lengths),
            )


def _with_prefix(shape: RequestShape, prefix: int, lengths: np.typing.NDArray[np.int64]) -> RequestShape:
    prefix = min(prefix, len(lengths) - 1)
    length = int(lengths[prefix])
    return dataclasses.replace(
        shape, num_prompt_tokens=shape.num_prompt_tokens + length, prefix=prefix, num_prefix_tokens=length
    )


def serve(
    chat: Chat, fleet: list[ExecutorProfile], placement: PlacementName, sessions_per_s: float, seed: int
) -> Outcome:
    """Serve the chat for the warm-up and the counted time."""
    traffic = Traffic(chat.schedule(sessions_per_s, WARM_UP_S + COUNTED_S, seed))
    config = scheduler_config({"enable_prefix_caching": True, "max_queued_requests": 100_000})
    prompts = Prompts(seed, 32_768)
    return Simulation(fleet, config, traffic, prompts=prompts, placement=placement, seed=seed, keep_steps=False).run()


def figures(outcome: Outcome) -> dict[str, float]:
    """Percentiles of the requests that are due in the counted time."""
    requests = outcome.requests
    counted = requests.select((requests.due_s >= WARM_UP_S) & (requests.due_s < WARM_UP_S + COUNTED_S))
    if not requests.ok.all():
        raise BenchmarkError("requests failed")
    ttft = 1000 * (counted.first_s - counted.due_s)
    return {
        **{f"ttft_p{mark}_ms": float(np.percentile(ttft, mark)) for mark in (50, 95, 99)},
        "ttft_mean_ms": float(ttft.mean()),
        "cached_share": float(counted.num_cached_tokens.sum() / counted.num_prompt_tokens.sum()),
        "requests_per_s": len(counted) / COUNTED_S,
        "num_preemptions": float(outcome.num_preemptions),
    }
