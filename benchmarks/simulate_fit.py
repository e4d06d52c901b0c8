"""Does the simulator predict a run that it was not fitted to? Real services on the CPU, two loads, one recorded.

Each repeat starts both services with `--record` and sends them the first load; `cadenza fit-costs` fits that. Then it
starts them again, without a recording, sends the second load (a higher rate, longer prompts, other outputs), and
simulates it. Rows state the errors of median TTFT, median TPOT and throughput, and how busy the executor was: near
saturation queues grow without bound, and so does the effect of a small error of the costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import Benchmark, positive, positive_number, progress
from benchmarks.common.burst_client import local_services
from benchmarks.common.checkpoints import DEMO_MODEL, SHAPES, random_checkpoint
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.rows import BenchmarkError, Row, make_row
from cadenza_loadtest.campaign import run_campaign
from cadenza_loadtest.driving.driver import Progress
from cadenza_loadtest.results.results import Run
from cadenza_loadtest.settings import LoadSettings, make_settings
from cadenza_simulator.campaign import Simulated, run_simulation
from cadenza_simulator.capacity.search import TrialProgress
from cadenza_simulator.executor_profiles import ExecutorProfile
from cadenza_simulator.fit import Fit, fit_costs, fitted_profile, with_clients
from cadenza_simulator.options import scheduler_config
from cadenza_simulator.recordings import read_recording

NAME = "simulate_fit"
_RATES = {"10m": 4.0, "135m": 0.4, "demo": 8.0}
"""Requests per second of the first load: light, so that batches of many sizes occur."""
_FITTED = {"input_len": "uniform:16:256", "output_len": "exponential:64:8:256"}
_PREDICTED = {"input_len": "uniform:32:384", "output_len": "exponential:48:8:192"}
_OPTIONS: dict[str, Any] = {"enable_prefix_caching": False}
_EXECUTOR: dict[str, Any] = {"num_threads": 1}
"""On two cores: the scheduler and the client use the other one; otherwise steps would take longer when they are
busy."""


class _Silent:
    """A view that shows nothing."""

    @contextlib.contextmanager
    def running(self, what: str, total: int | None) -> Iterator[None]:
        """Nothing is shown."""
        yield

    def on_trial(self, now: TrialProgress) -> None:
        """Nothing is shown."""

    def on_progress(self, now: Progress) -> None:
        """Nothing is shown."""

    def say(self, text: str) -> None:
        """Nothing is shown."""


def loads(shape: str, num_requests: int, times_rate: float, seed: int) -> tuple[LoadSettings, LoadSettings]:
    """The fitted load and the predicted load."""
    common = {"num_requests": num_requests, "warm_up_requests": 8}
    return (
        make_settings({**common, **_FITTED, "request_rate": _RATES[shape], "seed": seed}),
        make_settings({**common, **_PREDICTED, "request_rate": times_rate * _RATES[shape], "seed": seed + 1_000_000}),
    )


def measure(model: Path, settings: LoadSettings, **options: Any) -> Run:
    """Run one load on new services; raises BenchmarkError if a request failed."""
    with local_services(model, **_OPTIONS, **_EXECUTOR, **options) as services:
        file = asyncio.run(run_campaign(settings, services.target, _Silent()))
    (run,) = file.points[0].runs
    if not run.requests.ok.all():
        raise BenchmarkError(f"requests failed: {run.metrics.errors}")
    return run


def predict(profile: ExecutorProfile, settings: LoadSettings) -> Run:
    """The same load in virtual time."""
    simulated = Simulated((profile,), scheduler_config(_OPTIONS))
    file, _ = run_simulation(settings, simulated, _Silent())
    return file.points[0].runs[0]


def measure_once(shape: str, num_requests: int, times_rate: float, seed: int) -> dict[str, float]:
    """One repeat: fit to one load, predict another."""
    model = DEMO_MODEL if shape == "demo" else random_checkpoint(shape)
    fitted, predicted = loads(shape, num_requests, times_rate, seed)
    with tempfile.TemporaryDirectory() as folder:
        log = str(Path(folder) / "fit.log")
        seen = measure(model, fitted, record=log)
        recording = read_recording(log)
    fit = with_clients(fit_costs(recording), seen.requests)
    profile = fitted_profile(recording, fit, shape, "the first load")
    again = predict(profile, fitted)
    measured, simulated = measure(model, predicted), predict(profile, predicted)
    return {
        **_errors("fitted", again, seen),
        **_errors("predicted", simulated, measured),
        "predicted_busy": _busy(measured),
        **_about(fit),
    }


def _errors(name: str, simulated: Run, measured: Run) -> dict[str, float]:
    """Relative errors of medians and throughput (simulated over measured, less 1), and the measured values."""
    found: dict[str, float] = {}
    for latency in ("ttft_s", "tpot_s"):
        simulated_value, measured_value = (
            getattr(simulated.metrics, latency).p50,
            getattr(measured.metrics, latency).p50,
        )
        found[f"{name}_{latency.removesuffix('_s')}_p50_ms"] = 1000 * measured_value
        found[f"{name}_{latency.removesuffix('_s')}_p50_error"] = simulated_value / measured_value - 1
    simulated_value, measured_value = _tokens_per_s(simulated), _tokens_per_s(measured)
    return {
        **found,
        f"{name}_tokens_per_s": measured_value,
        f"{name}_tokens_per_s_error": simulated_value / measured_value - 1,
    }


def _tokens_per_s(run: Run) -> float:
    """From the first request's due time to the last token."""
    requests = run.requests
    return float(requests.num_output_tokens.sum() / (requests.last_s.max() - requests.due_s.min()))


def _busy(measured: Run) -> float:
    """Share of the time from the first step to the last in which a step ran."""
    steps = measured.steps
    if steps is None or steps.num_dropped:
        raise BenchmarkError("some step records are missing")
    return float(steps.device_s.sum() / (steps.applied_s.max() - steps.planned_s.min()))


def _about(fit: Fit) -> dict[str, float]:
    overheads = fit.overheads
    return {
        "step_median_error": fit.median_error,
        "step_explained": fit.explained,
        "step_us": fit.costs.step_us,
        "token_us": fit.costs.token_us,
        "plan_us": overheads.plan_us,
        "transit_us": overheads.transit_us,
        "request_and_reply_us": overheads.request_us + overheads.reply_us,
    }


def _run(options: argparse.Namespace) -> Iterator[Row]:
    wait_quiet(options.quiet_wait_s)
    repeats, other_cores = [], []
    for index in range(options.repeats):
        progress(f"{NAME}: {options.shape}: repeat {index + 1} of {options.repeats}")
        with OtherLoad() as other:
            repeats.append(measure_once(options.shape, options.requests, options.times_rate, options.seed + index))
        other_cores.append(other.cores)
    fitted, predicted = loads(options.shape, options.requests, options.times_rate, options.seed)
    params = {
        "shape": options.shape,
        "requests": options.requests,
        "fitted": {"rate_per_s": fitted.request_rate, **_FITTED},
        "predicted": {"rate_per_s": predicted.request_rate, **_PREDICTED},
        "options": {**_OPTIONS, **_EXECUTOR},
    }
    row = make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=other_cores)
    yield row.with_runs(repeats)


def _describe(row: Row) -> str:
    found = row.medians
    lines = [f"{row.params['shape']}: a step's error {found['step_median_error']:.1%} (median)"]
    for name in ("fitted", "predicted"):
        lines.append(
            f"  {name} at {row.params[name]['rate_per_s']:g} requests/s: "
            f"TTFT p50 {found[f'{name}_ttft_p50_ms']:.1f} ms ({found[f'{name}_ttft_p50_error']:+.1%} simulated), "
            f"TPOT p50 {found[f'{name}_tpot_p50_ms']:.2f} ms ({found[f'{name}_tpot_p50_error']:+.1%}), "
            f"{found[f'{name}_tokens_per_s']:.0f} tokens/s ({found[f'{name}_tokens_per_s_error']:+.1%})"
        )
    lines.append(f"  the executor was busy for {found['predicted_busy']:.0%} of the predicted run")
    return "\n".join(lines)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=[*SHAPES, "demo"], default="10m", help="of the model (default 10m)")
    parser.add_argument(
        "--times-rate", type=positive_number, default=1.5, help="the second load's rate over the first's (default 1.5)"
    )
    parser.add_argument("--requests", type=positive, default=200, help="of each load (default 200)")


BENCHMARK = Benchmark(
    NAME, "does the simulator predict a run that it was not fitted to?", _add_options, _run, _describe
)
