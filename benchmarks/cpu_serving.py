"""How fast is the whole of Cadenza on the CPU? Bursts, steady decode, arrivals over time and start-up, beside its
peers.

All systems run on the same cores and the same random-weight checkpoints in one run: each in its own processes, in
turns, while the others are loaded and idle. Cadenza is the whole system, with two processes and gRPC in the measured
time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # `python benchmarks/cpu_serving.py`, from anywhere, without an installation of Cadenza
    _ROOT = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(_ROOT), str(_ROOT / "client")]

from benchmarks.common.benchmark import Benchmark, positive_number, progress, run_command
from benchmarks.common.checkpoints import (
    SHAPES,
    about_model,
    about_workload,
    add_serving_options,
    model_folder,
    random_checkpoint,
    requests_of,
    service_options,
    vocab_size,
)
from benchmarks.common.rows import BenchmarkError, Row
from benchmarks.common.workload import Request, decode_workload, poisson_arrivals
from benchmarks.serving.opening import (
    CADENZA,
    OVER_TIME,
    SYSTEMS,
    VLLM,
    add_peer_options,
    chosen_systems,
    names_type,
    open_systems,
)
from benchmarks.serving.results import START, STARTED, describe, measure_starts, serving_row
from benchmarks.serving.systems import Cadenza, Job, Run, System, burst_rate, measure_all, run_text, warm_up
from cadenza import Client

NAME = "cpu_serving"
AT_ONCE = ("burst", "decode1", "decode16")
POISSON = "poisson"
MEASURES = (*AT_ONCE, POISSON, START)


def _run(options: argparse.Namespace) -> Iterator[Row]:
    names = chosen_systems(options)
    for measure, fit in ((POISSON, OVER_TIME), (START, STARTED)):
        if measure in options.measure and not set(names) & set(fit):
            raise BenchmarkError(f"--measure {measure}: it is for {', '.join(fit)} only")
    for folder in _models(options):
        yield from _run_model(names, folder, options)


def _run_model(names: Sequence[str], folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    requests, service = requests_of(options, folder), service_options(options)
    params: dict[str, Any] = {"model": folder.name, "options": service}
    jobs = [_job(measure, folder, requests, options.seed) for measure in options.measure if measure in AT_ONCE]
    # The time of a start does not depend on the tokens, and the check of a large model takes minutes.
    if CADENZA in names and set(options.measure) != {START}:
        from benchmarks.peers.transformers import check_greedy

        progress(f"{NAME}: {folder.name}: comparing greedy tokens in fp32")
        # All timed requests, and those of the burst in any case.
        checked = [*requests, *(request for job in jobs for request in job.requests if job.requests is not requests)]
        params["greedy_tokens_equal"] = check_greedy(folder, checked, **service)
    runs: list[Run] = []
    if jobs:
        all_requests = [request for job in jobs for request in job.requests]
        with open_systems(names, folder, all_requests, options, service) as systems:
            params |= _about(folder, systems)
            runs = _all(folder, measure_all(systems, jobs, options.repeats, options.quiet_wait_s))
        for job in jobs:
            yield _row(job, params, [run for run in runs if run.measure == job.measure], options)
    if POISSON in options.measure:
        with open_systems(names, folder, requests, options, service, over_time=True) as systems:
            params |= _about(folder, systems)
            rate = options.rate or float(f"{_saturated_rate(systems, requests, runs) / 2:.3g}")
            job = Job(POISSON, requests, poisson_arrivals(len(requests), rate, options.seed + 1), rate)
            runs = _all(folder, measure_all(systems, [job], options.repeats, options.quiet_wait_s))
        yield _row(job, params, runs, options)
    if START in options.measure:
        (request,) = decode_workload(1, options.seed, vocab_size(folder))
        found = _all(folder, measure_starts(names, folder, request, options, service))
        yield _row(Job(START, [request]), params, found, options)


def _all(folder: Path, runs: Iterable[Run]) -> list[Run]:
    """All runs; reports each one when it has ended."""
    found = []
    for run in runs:
        progress(f"{NAME}: {folder.name}: {run_text(run)}")
        found.append(run)
    return found


def _row(job: Job, params: dict[str, Any], runs: Sequence[Run], options: argparse.Namespace) -> Row:
    rate = {} if job.rate is None else {"rate_per_s": job.rate}
    return serving_row(NAME, options.seed, {**params, **about_workload(job.requests), **rate}, runs)


def _job(measure: str, folder: Path, requests: list[Request], seed: int) -> Job:
    if measure == "burst":
        return Job(measure, requests)
    return Job(measure, decode_workload(int(measure.removeprefix("decode")), seed, vocab_size(folder)))


def _saturated_rate(systems: Sequence[System], requests: Sequence[Request], runs: Sequence[Run]) -> float:
    """Requests per second that vLLM, or without it Cadenza, serves in a burst: one of this run, or an extra one."""
    for name in (VLLM, CADENZA):
        known = burst_rate(runs, name)
        if known is not None:
            return known
    names = [system.name for system in systems]
    system = systems[names.index(VLLM)] if VLLM in names else systems[0]
    system.serve(warm_up(requests))
    return len(requests) / system.serve(requests).wall_s


def _about(folder: Path, systems: Sequence[System]) -> dict[str, Any]:
    for system in systems:
        if isinstance(system, Cadenza):
            with Client(system.services.target) as client:
                return about_model(folder, client.model_info())
    return {}


def _models(options: argparse.Namespace) -> list[Path]:
    if options.model is not None:
        return [model_folder(options.model)]
    shapes = ("135m", "10m") if options.shape == "all" else (options.shape,)
    return [random_checkpoint(shape) for shape in shapes]


def _flat_json(row: Row) -> str:
    """One object for each system and run."""
    return "\n".join(json.dumps(run) for run in row.runs)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all", help="random checkpoints (default all)")
    parser.add_argument("--model", help="folder of a checkpoint, instead of --shape")
    parser.add_argument(
        "--measure",
        type=names_type(MEASURES),
        default=["burst"],
        metavar="NAMES",
        help=f"of {','.join(MEASURES)} (burst)",
    )
    parser.add_argument(
        "--systems",
        type=names_type(SYSTEMS),
        metavar="NAMES",
        help=f"of {','.join(SYSTEMS)} (default: cadenza, transformers-static, and the peers with an interpreter)",
    )
    add_peer_options(parser)
    parser.add_argument(
        "--rate", type=positive_number, help="arrivals per second in poisson (default: half of what vLLM's burst gives)"
    )
    add_serving_options(parser)


BENCHMARK: Benchmark = Benchmark(
    NAME, "how fast is Cadenza on the CPU, beside its peers?", _add_options, _run, describe, _flat_json
)

if __name__ == "__main__":
    sys.exit(run_command(BENCHMARK, sys.argv[1:]))
