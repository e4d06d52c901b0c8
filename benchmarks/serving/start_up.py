"""Time from process start to the first token: `cadenza up` and vLLM's server, each as a new process."""

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
from benchmarks.common.rows import ROOT, BenchmarkError
from benchmarks.common.workload import Request
from benchmarks.peers.process import last_lines, log_file, stop
from benchmarks.serving.opening import CADENZA, VLLM, open_vllm_server
from benchmarks.serving.runs import Run, timed

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
