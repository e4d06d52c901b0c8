"""The peer's stage: transformers in its own process, which may crash, hang, or need other settings."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.rows import BenchmarkError
from benchmarks.common.workload import Request
from benchmarks.gpu.common.cases import Metrics
from benchmarks.gpu.serving.run import Run
from benchmarks.peers.process import peer_process

PEER_S, MIN_PEER_S = 90.0, 45.0
"""Expected duration of the peer, loading included, and the least time left for an attempt."""
_PEER = "benchmarks.gpu.peers.transformers"
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
