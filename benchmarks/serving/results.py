"""Rows from runs: medians of each system, and Cadenza's ratios to each peer, repeat by repeat.

Also the time from process start to the first token: `cadenza up` and vLLM's server, each as a new process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.burst_client import StreamTimes, stream_burst
from benchmarks.common.rows import ROOT, BenchmarkError, Row, make_row
from benchmarks.common.workload import Request
from benchmarks.peers.process import last_lines, log_file, stop
from benchmarks.serving.opening import CADENZA, VLLM, open_vllm_server
from benchmarks.serving.systems import Run, timed

_OWN = ("cadenza", "cadenza-stream")  # the first of these that was measured is compared with the peers
_LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
_SPEED = "tokens_per_s"
_COMPARED = {"poisson": _LATENCIES, "start": ("start_s",)}


def serving_row(name: str, seed: int, params: Mapping[str, Any], runs: Sequence[Run]) -> Row:
    """One row of all systems and repeats of one measurement, with `SYSTEM_METRIC` and ratios taken in each repeat."""
    num_repeats = 1 + max(run.repeat for run in runs)
    repeats = [_flat([run for run in runs if run.repeat == index]) for index in range(num_repeats)]
    systems = {run.system: run.about for run in runs}
    row = make_row(
        name,
        seed=seed,
        params={"measure": runs[0].measure, **params, "systems": systems},
        repeats=repeats,
        other_cores=[run.other_cores for run in runs],
    )
    return row.with_runs([_object(run, params, row) for run in runs])


def describe(row: Row) -> str:
    """A row as text: a line for each system."""
    params, found = row.params, row.medians
    lines = [f"{params['model']}, {params['measure']}: {params['requests']} requests, {params['output_tokens']} tokens"]
    for system in params["systems"]:
        shown = [
            metric
            for metric in (_SPEED, *_LATENCIES, "start_s", "peak_mb", "stays_mb", "peak_ratio", "rss_mb")
            if f"{key(system)}_{metric}" in found
        ]
        ratios = [name for name in found if name == f"ratio_{key(system)}" or name in _latency_ratios(system)]
        values = [f"{metric} {found[f'{key(system)}_{metric}']:.4g}" for metric in shown]
        values += [f"{name.replace(f'_{key(system)}', '')} {found[name]:.3g}" for name in ratios]
        lines.append(f"  {system:22} " + ", ".join(values))
    memory = [f"{name} {value:.0f}" for name, value in found.items() if name in ("executor_rss_mb", "scheduler_rss_mb")]
    return "\n".join([*lines, *(f"  {text}" for text in memory)])


def _latency_ratios(system: str) -> set[str]:
    return {f"ratio_{key(system)}_{metric.removesuffix('_ms')}" for metric in _LATENCIES}


def key(system: str) -> str:
    """A system's name as part of a metric's."""
    return system.replace("-", "_").replace(".", "_")


def _flat(runs: Sequence[Run]) -> dict[str, float]:
    """The metrics of one repeat."""
    found: dict[str, float] = {}
    for run in runs:
        # With given arrivals, tokens per second depend on the arrivals, not on the system.
        left_out = {"wall_s", "requests_per_s", *((_SPEED,) if run.measure == "poisson" else ())}
        for metric, value in run.metrics.items():
            if metric.endswith("_rss_mb"):  # of Cadenza's services, for both ways of sending
                found[metric] = max(value, found.get(metric, 0.0))
            elif metric not in left_out:
                found[f"{key(run.system)}_{metric}"] = value
    own = next((run for name in _OWN for run in runs if run.system == name), None)
    for run in runs:
        if own is not None and run.system not in _OWN:
            found |= _ratios(own, run)
    return found


def _ratios(own: Run, peer: Run) -> dict[str, float]:
    """`ratio_SYSTEM`, or `ratio_SYSTEM_METRIC` if several metrics are compared; above 1 Cadenza is better."""
    compared = _COMPARED.get(own.measure, (_SPEED,))
    found = {}
    for metric in compared:
        if metric in own.metrics and metric in peer.metrics:
            name = f"ratio_{key(peer.system)}" + (f"_{metric.removesuffix('_ms')}" if len(compared) > 1 else "")
            own_value, peer_value = own.metrics[metric], peer.metrics[metric]
            found[name] = own_value / peer_value if metric == _SPEED else peer_value / own_value
    return found


def _object(run: Run, params: Mapping[str, Any], row: Row) -> dict[str, Any]:
    """The flat object that --json prints for one run."""
    shared = {name: value for name, value in params.items() if not isinstance(value, dict)}
    return {
        "system": run.system,
        "measure": run.measure,
        "model": shared.pop("model"),
        "repeat": run.repeat,
        **{metric: float(f"{value:.5g}") for metric, value in run.metrics.items()},
        **shared,
        **run.about,
        "options": " ".join(f"{name}={value}" for name, value in params["options"].items()),
        "seed": row.seed,
        "other_cores": round(run.other_cores, 2),
        "cpu": row.machine["cpu"],
        "cores": row.machine["cores"],
        **{name: row.versions[name] for name in ("python", "cadenza", "commit")},
    }


STARTED = (CADENZA, VLLM)
START = "start"
_Start = Callable[[contextlib.ExitStack], tuple[dict[str, float], dict[str, Any]]]
"""Starts a system and serves one request; returns `start_s`, the seconds to the first token, and other metrics, and the
system's facts."""


def measure_starts(
    names: Sequence[str], folder: Path, request: Request, options: argparse.Namespace, service: Mapping[str, Any]
) -> Iterator[Run]:
    """Each system is started, serves one request and is stopped, in turns; `start_s` ends with the first token.

    Of Cadenza's executor also the peak of its memory until then, what stays, and their ratio.
    """
    starts: dict[str, _Start] = {
        CADENZA: lambda stack: _start_cadenza(stack, folder, request, service),
        VLLM: lambda stack: _start_vllm(stack, folder, request, options),
    }
    for repeat in range(options.repeats):
        for name in names:
            if name in starts:
                yield _timed(name, repeat, options.quiet_wait_s, starts[name])


def _timed(name: str, repeat: int, quiet_wait_s: float, start: _Start) -> Run:
    # Stopped after the run: the CPU time of a process that its parent does not reap is lost.
    with contextlib.ExitStack() as stack:

        def take() -> tuple[dict[str, float], dict[str, Any]]:
            return start(stack)

        return timed(START, name, repeat, (), quiet_wait_s, take)


def _start_cadenza(
    stack: contextlib.ExitStack, folder: Path, request: Request, service: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, Any]]:
    start = time.perf_counter()
    target = stack.enter_context(cadenza_up(folder, service))
    times, wall_s = asyncio.run(stream_burst(target, [request]))
    return {"start_s": _first_token_s(start, times, wall_s), **_executor_memory()}, {}


def _start_vllm(
    stack: contextlib.ExitStack, folder: Path, request: Request, options: argparse.Namespace
) -> tuple[dict[str, float], dict[str, Any]]:
    start = time.perf_counter()
    server = stack.enter_context(open_vllm_server(folder, [request], options))
    served = server.serve([request])
    return {"start_s": _first_token_s(start, served.times or [], served.wall_s)}, dict(server.about)


def _first_token_s(start: float, times: Sequence[StreamTimes], wall_s: float) -> float:
    """Seconds from `start` to the first token; call it when a run of one request has just ended."""
    return time.perf_counter() - start - (wall_s - times[0].first_s)


def _executor_memory() -> dict[str, float]:
    """The executor's resident memory: its peak so far, what it has now, and how many times the peak is of that.

    Nothing where the system has no /proc. Raises BenchmarkError if there is not one executor.
    """
    if not Path("/proc/self/status").exists():
        return {}
    pids = [child.pid for child in psutil.Process().children(recursive=True) if "executor_svc" in child.cmdline()]
    if len(pids) != 1:
        raise BenchmarkError(f"{len(pids)} executors run, not one")
    lines = Path(f"/proc/{pids[0]}/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    peak, stays = (int(fields[name].split()[0]) / 1024 for name in ("VmHWM", "VmRSS"))
    return {"peak_mb": peak, "stays_mb": stays, "peak_ratio": peak / stays}


@contextlib.contextmanager
def cadenza_up(folder: Path, service: Mapping[str, Any]) -> Iterator[str]:
    """Start `cadenza up` as a process and wait until it prints `ready HOST:PORT`; yields that address.

    Raises BenchmarkError if it ends before.
    """
    settings = {"device": "cpu", "skip_tokenizer_init": True, **service}
    # Booleans in the form of the environment; other values, such as a folder, are unchanged.
    environment = {
        f"CADENZA_{name.upper()}": str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in settings.items()
    }
    command = [sys.executable, "-m", "cadenza", "up", "--model", str(folder), "--port", "0"]
    with log_file() as log, log.open("w", encoding="utf-8") as log_out:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log_out, text=True, cwd=ROOT, env={**os.environ, **environment}
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("ready "):
                    break
            else:
                raise BenchmarkError("`cadenza up` has ended: " + last_lines(log))
            yield line.split()[1]
        finally:
            stop(process, terminate=True)
            process.stdout.close()
