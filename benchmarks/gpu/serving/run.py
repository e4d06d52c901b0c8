"""The run of one shape: its requests, the time left, and its stages as rows.

The peer, transformers, has its own process, which may crash, hang, or need other settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.benchmark import SEED
from benchmarks.common.checkpoints import about_workload
from benchmarks.common.rows import BenchmarkError, OtherLoad
from benchmarks.common.workload import Request
from benchmarks.gpu import environment
from benchmarks.gpu.cases import Ceilings, Goal, Metrics, Outcome, one_line
from benchmarks.gpu.environment import Output
from benchmarks.gpu.shapes import ModelShape
from benchmarks.peers.process import peer_process

ROWS = "gpu_serving"
MAX_NUM_SEQS, MAX_BATCHED_TOKENS = 512, 8192


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a run."""

    requests: Sequence[Request]
    sample: Sequence[Request]
    """Those that the peer serves too."""
    decodes: Sequence[Request]
    """Equal requests, for decode steps."""
    warm_up: Sequence[Request]


@dataclass
class Run:
    """The stages of one shape and their outcomes."""

    shape: ModelShape
    load: Load
    device: str
    end_at: float
    output: Output
    ceilings: Ceilings = field(default_factory=Ceilings)
    fp8: bool = False
    """Weights and activations of linears in fp8, keys and values too."""
    exact: bool = False
    """In exact mode."""
    changed: dict[str, Any] = field(default_factory=dict)
    """Options of the services that stages have in place of the usual ones."""
    found: list[tuple[Outcome, Goal | None]] = field(default_factory=list)

    def stage(
        self,
        name: str,
        estimate_s: float,
        work: Callable[[], Metrics],
        requests: Sequence[Request] = (),
        goal: Goal | None = None,
    ) -> Metrics:
        """Run a stage if there is time, and record its outcome; returns no metrics if it failed or was skipped."""
        params = {"shape": self.shape.name, **(about_workload(requests) if requests else {}), **self.options()}
        outcome = Outcome(self.shape.name, name, params)
        left = self.end_at - time.monotonic()
        with OtherLoad() as other:
            if left < estimate_s:
                outcome = replace(outcome, skipped=f"{max(left, 0):.0f} s were left, it takes {estimate_s:.0f}")
            else:
                try:
                    outcome = replace(outcome, metrics=work())
                except Exception as error:
                    outcome = replace(outcome, error=one_line(error))
        self.add(outcome, goal, other.cores)
        return outcome.metrics

    def add(self, outcome: Outcome, goal: Goal | None = None, other_cores: float = 0.0) -> None:
        """Record an outcome: print a line, and append a row if there are metrics."""
        self.found.append((outcome, goal))
        print(environment.as_line(outcome, goal), flush=True)
        if outcome.metrics:
            self.output.add(environment.row_of(ROWS, outcome, SEED, other_cores))

    def options(self) -> dict[str, Any]:
        """Options of the services."""
        on_gpu = self.device == "cuda"
        longest = max(len(each.prompt) + each.output_len for each in (*self.load.requests, *self.load.decodes))
        in_fp8 = {"quantization": "fp8_w8a8", "kv_cache_dtype": "fp8"} if self.fp8 and on_gpu else {}
        return {
            **in_fp8,
            "device": self.device,
            "numerics": "exact" if self.exact else "fast",
            "load_format": "dummy",
            "enable_prefix_caching": False,
            "max_model_len": -(-longest // 16) * 16,
            "max_num_seqs": MAX_NUM_SEQS if on_gpu else 8,
            "max_num_batched_tokens": MAX_BATCHED_TOKENS if on_gpu else 256,
            **self.changed,
        }

    def limited(self, work: Any) -> Any:
        """Run a coroutine until it ends; raises TimeoutError when no time is left."""
        return asyncio.run(asyncio.wait_for(work, max(1.0, self.end_at - time.monotonic())))

    def limited_metrics(self, work: Callable[[], Coroutine[Any, Any, Metrics]]) -> Metrics:
        """Run a coroutine function as `limited` does; returns its metrics."""
        metrics: Metrics = self.limited(work())
        return metrics


PEER_S, MIN_PEER_S = 90.0, 45.0
"""Expected duration of the peer, loading included, and the least time left for an attempt."""
_PEER = "benchmarks.gpu.serving.transformers"
_PEER_ATTEMPTS = 4


def serve_peer(run: Run, model: Path) -> Metrics:
    """Tokens per second of the peer's requests. After an error the next settings are tried.

    Raises BenchmarkError with the last error.
    """
    # The peer has no time limit of its own.
    limit = threading.Timer(max(1.0, run.end_at - time.monotonic()), _kill_peer)
    limit.start()
    try:
        for left_out in range(_PEER_ATTEMPTS):
            try:
                return _measure_peer(run, model, left_out)
            except BenchmarkError as error:
                print(f"transformers, without the first {left_out} settings: {error}", flush=True)
                if left_out == _PEER_ATTEMPTS - 1 or run.end_at - time.monotonic() < MIN_PEER_S:
                    raise
        raise BenchmarkError("transformers was not started")
    finally:
        limit.cancel()


def _measure_peer(run: Run, model: Path, left_out: int) -> Metrics:
    requests = run.load.sample
    longest = [max(len(each.prompt) for each in requests), max(each.output_len for each in requests)]
    arguments = [str(model), run.device, *map(str, (left_out, len(requests), *longest))]
    with peer_process(Path(sys.executable), _PEER, arguments) as peer:
        peer.call(_message([replace(each, output_len=8) for each in requests[:16]]))
        answer = peer.call(_message(requests))
    print(f"transformers {peer.version} with {peer.about['settings'] or 'its own settings'}", flush=True)
    num_tokens = sum(each.output_len for each in requests)
    return {"tokens_per_s": num_tokens / answer["wall_s"], "wall_s": answer["wall_s"]}


def _kill_peer() -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if _PEER in child.cmdline():
                child.kill()


def _message(requests: Sequence[Request]) -> dict[str, Any]:
    rows = [{"prompt": each.prompt, "output_len": each.output_len} for each in requests]
    return {"requests": rows, "arrivals": None}
