"""Processes in a group of their own that end at a time: interrupted first, then killed with all that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import IO

from benchmarks.common.rows import ROOT


def run_until(words: Sequence[str], end_at: float, grace_s: float, out: IO[str] | None = None) -> int | None:
    """Run a command in the repository's folder; returns its exit code, None if it did not end by itself.

    Args:
        words: the command.
        end_at: of time.monotonic(); after it the group is interrupted, and `grace_s` seconds later killed.
        grace_s: seconds to end in after the interrupt.
        out: where both of its outputs go; None: this process's own.
    """
    both = subprocess.STDOUT if out is not None else None
    process = subprocess.Popen(words, stdout=out, stderr=both, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(max(0.1, end_at - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            _end(process, grace_s)


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    # The process may have ended and left others.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
