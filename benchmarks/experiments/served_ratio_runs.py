"""Experiment 7's runs: Poisson arrivals, with new requests held back by increasing ratios, at both places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common.checkpoints import random_checkpoint
from benchmarks.experiments.experiment import RunSettings
from benchmarks.experiments.served import Server
from benchmarks.experiments.simulated import Case, a100_13b, about, drawn, fixed, poisson, run
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.latencies import end_of, per_request
from cadenza_loadtest.requests import Floats

MIDDLE = 1.2
"""TGI's default for long; 0.3 later."""
_RATES = (4.0, 7.0)
_LOAD = {"input_len": "uniform:1:512", "output_len": "exponential:128:1:1536"}
_CPU_LOAD = {"input_len": "uniform:1:256", "output_len": "exponential:64:1:512"}
_CPU_RATES = (0.5, 0.8)
"""Shares of the server's throughput with all requests at once."""
_QUANTILES = (("ttft_s", 0.5), ("ttft_s", 0.99), ("tpot_s", 0.5), ("tpot_s", 0.99), ("e2e_s", 0.5))


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of a figure: all ratios at one rate."""

    rate: float

    @property
    def label(self) -> str:
        """The label in legends."""
        return f"{self.rate:g} requests/s"


@dataclass(frozen=True, slots=True)
class Point:
    """Results for one ratio; [seeds] seconds each."""

    ttft_p50_s: Floats
    ttft_p99_s: Floats
    tpot_p50_s: Floats
    tpot_p99_s: Floats
    e2e_p50_s: Floats


@dataclass(frozen=True, slots=True)
class Outcome:
    """All results of the experiment at one place."""

    setup: Mapping[str, Any]
    found: Mapping[Setting, Mapping[float, Point]]
    """By setting, then by ratio, ascending."""


def simulated(settings: RunSettings) -> Outcome:
    """On the published A100 with a 13B model."""
    profile = a100_13b()
    num_requests, seeds = (30, 1) if settings.quick else (1000, 3)
    rates, ratios = (
        (_RATES[-1:], (0.0, MIDDLE, 4.0)) if settings.quick else (_RATES, (0.0, 0.1, 0.3, 0.6, 1.2, 2.0, 4.0))
    )

    def point(setting: Setting, ratio: float) -> Point:
        runs = []
        for seed in range(settings.seed, settings.seed + seeds):
            times = poisson(setting.rate, num_requests, seed)
            case = Case(profile, drawn(_LOAD, num_requests, seed), times, _options(ratio))
            runs.append(run(case).requests)
        return _point(runs)

    all_settings = [Setting(rate) for rate in rates]
    return Outcome(
        setup=about(profile) | {"load": _load_text(num_requests, _LOAD), "runs of each": seeds},
        found={setting: {ratio: point(setting, ratio) for ratio in ratios} for setting in all_settings},
    )


def measured(settings: RunSettings) -> Outcome:
    """The 10.5M shape on this machine's CPU; a few minutes."""
    model, options = random_checkpoint("10m"), {"device": "cpu", "max_num_seqs": 64, "num_gpu_blocks": 2048}
    num_requests, seeds = (16, 1) if settings.quick else (160, 1)
    shares, ratios = (_CPU_RATES[-1:], (0.0, MIDDLE, 4.0)) if settings.quick else (_CPU_RATES, (0.0, 0.3, 1.2, 4.0))
    warm_up = fixed([128] * 8, [16] * 8)
    with Server(model, options) as server:
        server.load(warm_up)
        capacity = num_requests / end_of(server.load(drawn(_CPU_LOAD, num_requests, settings.seed), seed=settings.seed))
    rates = [float(f"{share * capacity:.2g}") for share in shares]

    def points(ratio: float) -> dict[float, Point]:
        """Results by rate, on one server."""
        runs: dict[float, list[RequestColumns]] = {rate: [] for rate in rates}
        with Server(model, {**options, **_options(ratio)}) as server:
            server.load(warm_up)
            for seed in range(settings.seed, settings.seed + seeds):
                for rate in rates:
                    times = poisson(rate, num_requests, seed)
                    runs[rate].append(server.load(drawn(_CPU_LOAD, num_requests, seed), times, seed=seed))
        return {rate: _point(each) for rate, each in runs.items()}

    by_ratio = {ratio: points(ratio) for ratio in ratios}
    services = ", ".join(f"{name} {value}" for name, value in options.items())
    return Outcome(
        setup={
            "model": f"{model.name}, 10.5M parameters",
            "services": services,
            "load": _load_text(num_requests, _CPU_LOAD),
            "rates": f"{', '.join(f'{share:.0%}' for share in shares)} of the {capacity:.1f} requests/s that are "
            "served when all arrive at once",
            "runs of each": seeds,
        },
        found={Setting(rate): {ratio: by_rate[rate] for ratio, by_rate in by_ratio.items()} for rate in rates},
    )


def _options(ratio: float) -> dict[str, Any]:
    return {"waiting_served_ratio": ratio}


def _load_text(num_requests: int, load: Mapping[str, str]) -> str:
    return (
        f"{num_requests:,} requests by a Poisson process, prompts {load['input_len']}, outputs {load['output_len']} "
        "tokens"
    )


def _point(runs: Sequence[RequestColumns]) -> Point:
    rows = []
    for columns in runs:
        latencies = per_request(columns)
        rows.append([float(np.nanquantile(latencies[name], share)) for name, share in _QUANTILES])
    return Point(*np.array(rows).T)
