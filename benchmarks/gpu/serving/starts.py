"""Stages of starts: both services with an empty folder of kernels, then with what the first start has left there."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.gpu.cases import Metrics
from benchmarks.gpu.serving.run import Run
from benchmarks.gpu.serving.stages import services_of

_ESTIMATE_S = 60.0


def serve_starts(run: Run, model: Path, trial: bool) -> None:
    """Run the stages of one shape: seconds until the services are ready, by the parent's clock."""
    estimate = 0.0 if trial else _ESTIMATE_S
    with tempfile.TemporaryDirectory(prefix="cadenza-kernels-") as folder:
        run.changed = {"kernel_cache": folder}
        cold = run.stage("start, no kernels kept", estimate, lambda: _start(run, model))
        warm = run.stage("start, kernels kept", estimate, lambda: _start(run, model))
        if cold and warm:
            run.stage("starts beside each other", 0.0, lambda: {"ratio": warm["start_s"] / cold["start_s"]})


def _start(run: Run, model: Path) -> Metrics:
    began = time.monotonic()
    with services_of(run, model):
        return {"start_s": time.monotonic() - began}
