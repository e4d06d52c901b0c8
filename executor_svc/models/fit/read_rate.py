"""How fast this machine reads its memory: measured once, and kept; again if other programs took the processor then."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from cadenza_common.run_files import cache_folder

_BYTES = 1 << 28
_REPEATS = 6
_ALONE = 0.9
"""From this share of the cores' time on, a measurement had the machine to itself."""


def read_rate(again: bool = False, file: Path | None = None) -> float:
    """Return bytes a second, of all cores together; takes half a second the first time, or `again`.

    A rate of a busy machine is too low: the next call measures again, and the higher one is kept. file: where.
    """
    file = file or cache_folder() / "read-rate.json"
    machine = f"{platform.node()} {platform.machine()} {_cores()} cores"
    before = 0.0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(file.read_text())
        if kept["machine"] == machine and not again:
            before = float(kept["bytes_per_s"])
            if kept["alone"]:
                return before
    rate, is_alone = _measure()
    rate = max(rate, before)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"machine": machine, "bytes_per_s": rate, "alone": is_alone}))
    return rate


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _measure() -> tuple[float, bool]:
    """Return the highest rate, and whether the fastest reading had the cores to itself."""
    parts = np.array_split(np.ones(_BYTES // 4, np.float32), _cores())
    best, share = 0.0, 0.0
    with ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(_REPEATS):
            began, began_cpu = time.perf_counter(), time.process_time()
            list(pool.map(np.max, parts))
            wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
            if _BYTES / wall_s > best:
                best, share = _BYTES / wall_s, cpu_s / (wall_s * len(parts))
    return best, share >= _ALONE
