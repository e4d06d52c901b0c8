"""Prefill and decode on executors of their own, or mixed with chunked prefill: which serves more within the limits?

`benchmarks.fleet` in virtual time: eight executors, all mixed with token budgets of 256 to 8,192 (the best
counts), or P of them for prompts and the others for decoding, P from 1 to 7 (the best counts), KV going from one
to the other over each prefill executor's link. The highest rate at which --share of the requests keep the limits, for
each mix of lengths and each pair of limits, linear between the rates tried. Poisson arrivals, the same for all; nothing
is cached between requests. Nothing here depends on the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.common.benchmark import Benchmark, positive, positive_number, progress
from benchmarks.common.rows import BenchmarkError, Row, make_row
from benchmarks.fleet.arrivals import MIXES, DrawnTraffic, MixName
from benchmarks.fleet.caches import model_of
from benchmarks.fleet.engine import Fleet, FleetPlan, Split
from benchmarks.fleet.results import FleetResult, Objective
from cadenza_simulator.options import find_profile
from cadenza_simulator.published import LLAMA_3_1_8B, LLAMA_3_1_405B

NAME = "disaggregation"
EXECUTORS = 8
BUDGETS = (256, 512, 2048, 8192)
_RATIO, _LOWEST = 1.3, 0.15
_SLICE_S = 0.05
_KV_BYTES = {"h200-llama-3.1-8b": LLAMA_3_1_8B.kv_bytes, "8xh200-llama-3.1-405b-fp8": LLAMA_3_1_405B.kv_bytes}
_LINKS = {"h200-llama-3.1-8b": 50.0, "8xh200-llama-3.1-405b-fp8": 400.0}
"""GB/s: a 400 Gbit/s port for each GPU."""
LIMITS = {
    "h200-llama-3.1-8b": (
        Objective(0.5, 0.006), Objective(0.5, 0.010), Objective(0.5, 0.020), Objective(2.0, 0.010),
        Objective(2.0, 0.05),
    ),
    "8xh200-llama-3.1-405b-fp8": (
        Objective(2.0, 0.025), Objective(2.0, 0.080), Objective(8.0, 0.025), Objective(8.0, 0.040), Objective(8.0, 0.2),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """How the executors work."""

    budget: int
    """Tokens of a step."""
    num_prefill: int = 0
    """0: all do both."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One rate."""

    rate: float
    shares: tuple[float, ...]
    """Of the requests that kept each pair of limits."""
    itl_p99_ms: float


class Comparison:
    """All layouts under one mix of lengths on one kind of executor."""

    def __init__(self, executor: str, mix: MixName, link_gb_per_s: float, duration_s: float, seed: int) -> None:
        self.limits = LIMITS[executor]
        self._executor, self._mix, self._seed = executor, mix, seed
        self._duration_s, self._bytes_per_s = duration_s, 1e9 * link_gb_per_s
        self._guess = EXECUTORS / self._busy_s()

    def trials(self, layout: Layout, share: float) -> list[Trial]:
        """Trials at rising rates, until no pair of limits is kept by the share of the requests."""
        found: list[Trial] = []
        rate = _LOWEST * self._guess
        while not found or max(found[-1].shares) >= share:
            result = self.run(layout, rate)
            shares = tuple(int(good) / max(1, result.tally.num_due) for good in result.tally.good)
            found.append(Trial(rate, shares, 1000 * result.tally.gaps.percentile(99)))
            rate *= _RATIO
            if len(found) > 40:
                raise BenchmarkError(f"{layout} keeps the limits at every rate")
        return found

    def run(self, layout: Layout, rate: float) -> FleetResult:
        """One rate."""
        profile = find_profile(self._executor)
        max_num_seqs = min(profile.limits.max_num_seqs, layout.budget)
        profile = profile.changed({"max_num_batched_tokens": layout.budget, "max_num_seqs": max_num_seqs})
        split = Split(layout.num_prefill, _KV_BYTES[self._executor], self._bytes_per_s) if layout.num_prefill else None
        plan = FleetPlan(
            model=model_of(profile), num_schedulers=1, num_executors=EXECUTORS, duration_s=self._duration_s,
            slice_s=_SLICE_S, objectives=self.limits, split=split, seed=self._seed,
        )  # fmt: skip
        return Fleet(plan, Unshared(self._mix, rate, self._seed)).run()

    def _busy_s(self) -> float:
        """About how long a request keeps an executor busy: a rate to begin with follows from it."""
        mix, profile = MIXES[self._mix], find_profile(self._executor)
        prompt, output = sum(mix.prompt) / len(mix.prompt), sum(mix.output) / len(mix.output)
        costs, batch = profile.costs, profile.limits.max_num_seqs / 4
        compute_us = costs.token_us * prompt + costs.context_token_us * prompt**2 / 2
        return (compute_us + output * (costs.step_us / batch + costs.kv_token_us * prompt)) / 1e6


class Unshared(DrawnTraffic):
    """A mix at a steady rate, of which nothing is cached: prompts are computed whole in both layouts."""

    def __init__(self, mix: MixName, rate: float, seed: int) -> None:
        super().__init__(mix, rate, seed, daily=False)
        self._mix = replace(MIXES[mix], beginning=0, continuation=None)
        self.num_sessions = self.num_groups = 0


def held(trials: Sequence[Trial], place: int, share: float) -> float:
    """The highest rate at which the share of the requests keeps the limits at `place`; 0 if none was."""
    best, before = 0.0, None
    for trial in trials:
        now = trial.shares[place]
        if now < share:
            if before is None:
                return 0.0
            fraction = (before.shares[place] - share) / max(before.shares[place] - now, 1e-9)
            return before.rate + fraction * (trial.rate - before.rate)
        best, before = trial.rate, trial
    return best


def _run(options: argparse.Namespace) -> Iterator[Row]:
    for executor in options.on:
        for mix in options.mixes:
            link = options.link_gb_per_s or _LINKS[executor]
            yield from _rows(
                options, Comparison(executor, mix, link, options.seconds, options.seed), executor, mix, link
            )


def _rows(options: argparse.Namespace, comparison: Comparison, executor: str, mix: str, link: float) -> Iterator[Row]:
    mixed = [Layout(budget) for budget in BUDGETS]
    split = [Layout(max(BUDGETS), num_prefill) for num_prefill in range(1, EXECUTORS)]
    found: dict[Layout, list[Trial]] = {}
    for layout in (*mixed, *split):
        progress(f"{NAME}: {executor}, {mix}, {link:g} GB/s, {layout}")
        found[layout] = comparison.trials(layout, options.share)
    for place, limits in enumerate(comparison.limits):
        rates = {layout: held(trials, place, options.share) for layout, trials in found.items()}
        best_mixed, best_split = max(mixed, key=rates.__getitem__), max(split, key=rates.__getitem__)
        metrics = {
            "mixed_per_s": rates[best_mixed],
            "mixed_budget": float(best_mixed.budget),
            "split_per_s": rates[best_split],
            "split_prefill": float(best_split.num_prefill),
            "split_over_mixed": rates[best_split] / rates[best_mixed]
            if rates[best_mixed]
            else float(bool(rates[best_split])),
            "mixed_itl_p99_ms": _itl_ms(found[best_mixed], rates[best_mixed]),
            "split_itl_p99_ms": _itl_ms(found[best_split], rates[best_split]),
        }
        params = {
            "executor": executor, "executors": EXECUTORS, "mix": mix, "link_gb_per_s": link,
            "ttft_s": limits.ttft_s, "tpot_s": limits.tpot_s, "share": options.share, "seconds": options.seconds,
        }  # fmt: skip
        yield make_row(NAME, seed=options.seed, params=params, repeats=[metrics], other_cores=[])


def _itl_ms(trials: Sequence[Trial], rate: float) -> float:
    """At the trial nearest below a rate."""
    return max(
        (trial for trial in trials if trial.rate <= rate), key=lambda trial: trial.rate, default=trials[0]
    ).itl_p99_ms


def _describe(row: Row) -> str:
    found, params = row.medians, row.params
    mixed = f"mixed {found['mixed_per_s']:.2f}/s (budget {found['mixed_budget']:.0f}, "
    mixed += f"ITL p99 {found['mixed_itl_p99_ms']:.0f} ms)"
    apart = f"apart {found['split_per_s']:.2f}/s ({found['split_prefill']:.0f} of {params['executors']} for prompts, "
    apart += f"ITL p99 {found['split_itl_p99_ms']:.0f} ms)"
    return (
        f"{params['executor']}, {params['mix']}, TTFT {params['ttft_s']:g} s, TPOT {1000 * params['tpot_s']:g} ms, "
        f"{params['link_gb_per_s']:g} GB/s: {mixed}, {apart}: {found['split_over_mixed']:.2f} times"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    names, mixes = tuple(LIMITS), tuple(MIXES)
    parser.add_argument("--on", nargs="+", choices=names, default=names, help="executors (default both)")
    parser.add_argument("--mixes", nargs="+", choices=mixes, default=mixes, help="lengths (default all)")
    parser.add_argument("--link-gb-per-s", type=positive_number, help="of each (default 50 for each GPU)")
    parser.add_argument("--share", type=positive_number, default=0.9, help="of the requests (default 0.9)")
    parser.add_argument("--seconds", type=positive, default=120, help="of arrivals at each rate (default 120)")


BENCHMARK = Benchmark(
    NAME, "do prefill and decode on executors of their own serve more?", _add_options, _run, _describe
)
