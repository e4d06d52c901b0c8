"""Columns, runs and files for tests of the load test's numbers: made by hand, or of a queue-like made-up server."""

from __future__ import annotations

from typing import Any

import numpy as np

from cadenza_loadtest.measures.columns import RequestColumns, StepColumns
from cadenza_loadtest.measures.metrics import Slo
from cadenza_loadtest.results.results import LoadTestFile, point_of, run_of

NAN = float("nan")


def columns(gaps: list[list[float]] | None = None, **given: Any) -> RequestColumns:
    """One row per value of the lists given; the others are as of requests that say nothing. `gaps`: per request."""
    n = max([len(values) for values in given.values()] + [len(gaps or [])])
    whole = {
        "index": range(n),
        "num_prompt_tokens": [10] * n,
        "num_cached_tokens": [-1] * n,
        "num_output_tokens": [1] * n,
        "num_samples": [1] * n,
        "num_preemptions": [-1] * n,
        "session": [-1] * n,
        "turn": [0] * n,
        "num_gaps": [len(each) for each in gaps] if gaps else [0] * n,
    }
    times = {name: [NAN] * n for name in ("first_s", "last_s", "queue_s", "server_first_s", "server_total_s")}
    words = {name: [""] * n for name in ("kind", "tenant", "error")}
    due_s = given.get("due_s", [0.0] * n)
    made: dict[str, Any] = {
        **{name: np.array(given.get(name, values), np.int64) for name, values in whole.items()},
        **{name: np.array(given.get(name, values), float) for name, values in times.items()},
        **{name: np.array(given.get(name, values), str) for name, values in words.items()},
        "due_s": np.array(due_s, float),
        "sent_s": np.array(given.get("sent_s", due_s), float),
        "adapter": np.array(given.get("adapter", []), str),
        "gap_s": np.array([gap for each in gaps or [] for gap in each], np.float32),
    }
    return RequestColumns(**made)


def made_up(
    num_requests: int, seed: int, *, slower: float = 1.0, rate: float = 10.0, adapters: int = 0
) -> RequestColumns:
    """Poisson arrivals, log-normal TTFTs around 0.15 s, TPOTs around 20 ms, one in fifty failed, kinds and tenants.

    adapters: that many, and none.
    """
    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(1 / rate, num_requests))
    sent_s = due_s + rng.exponential(0.0005, num_requests)
    first_s = sent_s + slower * rng.lognormal(-2, 0.5, num_requests)
    tokens = rng.integers(2, 30, num_requests)
    gaps = [(slower * rng.gamma(4, 0.005, count - 1)).tolist() for count in tokens]
    return columns(
        gaps,
        due_s=due_s,
        sent_s=sent_s,
        first_s=first_s,
        last_s=first_s + np.array([sum(each) for each in gaps]),
        num_output_tokens=tokens,
        queue_s=rng.exponential(0.01, num_requests),
        num_cached_tokens=rng.integers(0, 5, num_requests),
        num_preemptions=rng.poisson(0.1, num_requests),
        kind=np.where(rng.random(num_requests) < 0.2, "long", "short"),
        tenant=np.where(rng.random(num_requests) < 0.5, "a.b", ""),
        error=np.where(rng.random(num_requests) < 0.02, "TIMEOUT", ""),
        adapter=[f"a{number}" if number else "" for number in np.arange(num_requests) % (adapters + 1)]
        if adapters
        else [],
    )


def made_up_steps(num_steps: int, seed: int, every_s: float = 0.025) -> StepColumns:
    """Steps of 20 ms of one executor with 100 blocks."""
    rng = np.random.default_rng(seed)

    def counts(high: int) -> Any:
        return rng.integers(0, high, num_steps)

    planned_s = every_s * np.arange(num_steps)
    names = ("num_sequences", "num_tokens", "num_sampled", "num_waiting", "num_running", "num_swapped")
    return StepColumns(
        executor=np.zeros(num_steps, np.int64),
        planned_s=planned_s,
        applied_s=planned_s + 0.02,
        device_s=rng.uniform(0.01, 0.02, num_steps),
        **{name: counts(20) for name in names},
        num_used_blocks=counts(101),
        num_blocks=np.full(num_steps, 100),
        num_stored_tokens=counts(1600),
        num_preempted=counts(2),
        num_dropped=3,
    )


def made_up_file(
    label: str, seeds: list[int], *, slower: float = 1.0, num_requests: int = 200, **more: Any
) -> LoadTestFile:
    """One point with a run for each seed, swept at request_rate 10 unless `swept` is given."""
    slo = more.pop("slo", Slo(ttft_s=0.3, tpot_s=0.05))
    swept = more.pop("swept", {"request_rate": 10.0})
    runs = [
        run_of(
            made_up(num_requests, seed, slower=slower),
            made_up_steps(40, seed, num_requests / 400),
            seed=seed,
            started_unix_s=1.7e9,
            window=(0.05 * num_requests / 10, 0.95 * num_requests / 10),
            slo=slo,
        )
        for seed in seeds
    ]
    settings = {"request_rate": float("inf"), "seed": 0, "workload": "random", **more.pop("settings", {})}
    values: dict[str, Any] = {"command": ["cadenza", "loadtest"], "server": {"model": "demo"}, **more}
    return LoadTestFile(label=label, settings=settings, points=[point_of(runs, swept)], **values)
