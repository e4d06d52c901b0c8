"""The peer's stage of `serve`: transformers in a process of its own, which may break, hang, or want other settings."""

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
from benchmarks.gpu.cases import Metrics
from benchmarks.gpu.serving_run import Run
from benchmarks.peers.process import peer_process

PEER_S, LEAST_PEER_S = 90.0, 45.0
"""What the peer takes, loading included, and what is left at least for a try."""
_PEER = "benchmarks.gpu.transformers_peer"
_PEER_ATTEMPTS = 4


def serve_peer(run: Run, model: Path) -> Metrics:
    """The peer's stage: tokens a second of its requests. With settings under which it breaks it is tried with others.

    Raises BenchmarkError with what it said last.
    """
    # It has no limit of its own, and what it has not ended by then it never will.
    limit = threading.Timer(max(1.0, run.end_at - time.monotonic()), _end_peer)
    limit.start()
    try:
        for left_out in range(_PEER_ATTEMPTS):
            try:
                return _ask_peer(run, model, left_out)
            except BenchmarkError as error:
                print(f"transformers, {left_out} settings left out: {error}", flush=True)
                if left_out == _PEER_ATTEMPTS - 1 or run.end_at - time.monotonic() < LEAST_PEER_S:
                    raise
        raise BenchmarkError("transformers was not asked")
    finally:
        limit.cancel()


def _ask_peer(run: Run, model: Path, left_out: int) -> Metrics:
    requests = run.load.some
    longest = [max(len(each.prompt) for each in requests), max(each.output_len for each in requests)]
    arguments = [str(model), run.device, *map(str, (left_out, len(requests), *longest))]
    with peer_process(Path(sys.executable), _PEER, arguments) as peer:
        peer.ask(_question([replace(each, output_len=8) for each in requests[:16]]))
        answer = peer.ask(_question(requests))
    print(f"transformers {peer.version} with {peer.about['settings'] or 'its own settings'}", flush=True)
    num_tokens = sum(each.output_len for each in requests)
    return {"tokens_per_s": num_tokens / answer["wall_s"], "wall_s": answer["wall_s"]}


def _end_peer() -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if _PEER in child.cmdline():
                child.kill()


def _question(requests: Sequence[Request]) -> dict[str, Any]:
    asked = [{"prompt": each.prompt, "output_len": each.output_len} for each in requests]
    return {"requests": asked, "arrivals": None}
