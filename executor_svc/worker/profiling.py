"""Traces of steps: by torch.profiler on request, and as NVTX ranges for Nsight Systems."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

_NO_SPAN = nullcontext()


class _TorchTrace:
    """A recording of torch.profiler, from start to stop, of the thread that calls both."""

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)

    def start(self) -> None:
        self._profiler.start()

    def stop(self) -> bytes:
        """Return the trace in Chrome's format, gzip."""
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json.gz")
            self._profiler.export_chrome_trace(str(path))
            return path.read_bytes()


class Spans:
    """Names the parts of a step in traces; costs nothing where no trace is possible."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._traced = False

    def record(self) -> Callable[[], bytes]:
        """Start a trace with the names of parts; return a function that stops it and returns the trace."""
        trace = _TorchTrace()
        trace.start()
        self._traced = True

        def stop() -> bytes:
            self._traced = False
            return trace.stop()

        return stop

    def __call__(self, name: str) -> AbstractContextManager[object]:
        if self._traced:
            return torch.profiler.record_function(name)
        return torch.cuda.nvtx.range(name) if self._on_gpu else _NO_SPAN
