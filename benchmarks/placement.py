"""How long do requests wait for their first token on several executors, by the policy that places them?

Prefix-heavy chat traffic in virtual time: sessions of several turns that begin with one of a few system prompts. The
policies are the scheduler's own two, and those of llm-d's and SGLang's routers (`cadenza_simulator.placement`). The
load is a share of CAPACITY, the sessions that an executor serves a second under round robin. `--tokens` measures
instead the output tokens/s of 1, 2 and 4 executors under more requests than they can serve at once. Nothing here
depends on the machine or on what else runs on it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.common.benchmark import Benchmark, positive, positive_number, progress
from benchmarks.common.rows import BenchmarkError, Row, make_row
from cadenza_loadtest.requests import RequestShape
from cadenza_loadtest.schedule import ScheduledRequest, make_schedule
from cadenza_loadtest.seeds import stream
from cadenza_loadtest.settings import make_settings
from cadenza_loadtest.workloads.prompts import Prompts
from cadenza_simulator.campaign import simulate
from cadenza_simulator.options import scheduler_config
from cadenza_simulator.placement import PLACEMENTS, PlacementName
from cadenza_simulator.published import A100_40GB, LLAMA_3_1_8B, published_profile
from cadenza_simulator.run import RunOutcome, Simulation
from cadenza_simulator.traffic import Traffic

NAME = "placement"
WARM_UP_S, COUNTED_S = 60.0, 120.0
"""Arrivals in this time do not count, and then those in this time do."""
CAPACITY = 2.0
"""Sessions per second per executor: under round robin two executors hold 1.8 (TTFT p99 under half a second), and at 2.1
their queues grow."""
LOADS = (0.6, 0.75, 0.9)
EXECUTOR = published_profile(A100_40GB, LLAMA_3_1_8B, max_num_seqs=256, max_num_batched_tokens=2048)
_PERCENTILES = (50, 95, 99)
_TOKENS_REQUESTS = 2048
"""For each executor, so that the end, when few requests are left, weighs the same."""


def serve(placement: PlacementName, num_executors: int, sessions_per_s: float, seed: int, chat: Chat) -> RunOutcome:
    """Serve the chat's sessions that begin in the warm-up and the counted time, to their ends."""
    traffic = Traffic(chat.schedule(sessions_per_s, WARM_UP_S + COUNTED_S, seed))
    config = scheduler_config({"enable_prefix_caching": True, "max_queued_requests": 100_000})
    fleet = [EXECUTOR] * num_executors
    prompts = Prompts(seed, 32_768)
    return Simulation(fleet, config, traffic, prompts=prompts, placement=placement, seed=seed, keep_steps=False).run()


def measure(placement: PlacementName, num_executors: int, load: float, seed: int, chat: Chat) -> dict[str, float]:
    """Figures of the requests that are due in the counted time."""
    outcome = serve(placement, num_executors, load * CAPACITY * num_executors, seed, chat)
    requests = outcome.requests
    if not requests.ok.all():
        raise BenchmarkError(f"{(~requests.ok).sum()} requests failed")
    counted = requests.select((requests.due_s >= WARM_UP_S) & (requests.due_s < WARM_UP_S + COUNTED_S))
    ttft_ms = 1000 * (counted.first_s - counted.due_s)
    return {
        **{f"ttft_p{mark}_ms": float(np.percentile(ttft_ms, mark)) for mark in _PERCENTILES},
        "ttft_mean_ms": float(ttft_ms.mean()),
        "cached_share": float(counted.num_cached_tokens.sum() / counted.num_prompt_tokens.sum()),
        "requests_per_s": len(counted) / COUNTED_S,
        "preemptions": float(outcome.num_preemptions),
    }


def tokens_per_s(num_executors: int, seed: int) -> float:
    """Output tokens per second of virtual time while all requests are sent at once."""
    settings = make_settings(
        {
            "num_requests": _TOKENS_REQUESTS * num_executors,
            "input_len": "exponential:128:1:1024",
            "output_len": "exponential:128:1:1024",
            "request_rate": float("inf"),
        }
    )
    config = scheduler_config({"max_queued_requests": 100_000})
    outcome = simulate(settings, [EXECUTOR] * num_executors, config, seed, keep_steps=False)
    return float(outcome.requests.num_output_tokens.sum() / outcome.duration_s)


def _run(options: argparse.Namespace) -> Iterator[Row]:
    seeds = range(options.seed, options.seed + options.repeats)
    chat = Chat(num_system_prompts=options.system_prompts)
    if options.tokens:
        yield from _token_rows(options.seed, seeds)
        return
    for num_executors in options.executors:
        for load in options.loads:
            for policy in options.policies:
                repeats = []
                for seed in seeds:
                    progress(f"{NAME}: {num_executors} executors at {load:.0%}, {policy}, seed {seed}")
                    repeats.append(measure(policy, num_executors, load, seed, chat))
                params = {
                    "what": "chat",
                    "executors": num_executors,
                    "load": load,
                    "policy": policy,
                    "system_prompts": chat.num_system_prompts,
                    "sessions_per_s": load * CAPACITY * num_executors,
                }
                yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=[])


def _token_rows(first_seed: int, seeds: range) -> Iterator[Row]:
    for num_executors in (1, 2, 4):
        progress(f"{NAME}: tokens of {num_executors} executors")
        repeats = [{"output_tokens_per_s": tokens_per_s(num_executors, seed)} for seed in seeds]
        params = {"what": "tokens", "executors": num_executors, "requests": _TOKENS_REQUESTS * num_executors}
        yield make_row(NAME, seed=first_seed, params=params, repeats=repeats, other_cores=[])


def _describe(row: Row) -> str:
    found, params = row.medians, row.params
    if params["what"] == "tokens":
        return f"{params['executors']} executors: {found['output_tokens_per_s']:,.0f} output tokens/s"
    marks = ", ".join(f"p{mark} {found[f'ttft_p{mark}_ms']:.0f}" for mark in _PERCENTILES)
    return (
        f"{params['executors']} executors at {params['load']:.0%} ({found['requests_per_s']:.1f} requests/s), "
        f"{params['policy']}: TTFT {marks} ms, {found['cached_share']:.0%} of the prompt tokens cached"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--executors", type=positive, nargs="+", default=[2, 4], help="numbers (default 2 4)")
    parser.add_argument(
        "--loads", type=positive_number, nargs="+", default=LOADS, help="shares of the capacity (default 0.6 0.75 0.9)"
    )
    parser.add_argument("--policies", nargs="+", choices=PLACEMENTS, default=PLACEMENTS, help="(default all)")
    parser.add_argument("--system-prompts", type=positive, default=32, help="number of system prompts (default 32)")
    parser.add_argument("--tokens", action="store_true", help="instead the tokens/s of 1, 2 and 4 executors")


BENCHMARK = Benchmark(
    NAME, "TTFT of prefix-heavy chat on several executors, by the placement policy?", _add_options, _run, _describe
)


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
