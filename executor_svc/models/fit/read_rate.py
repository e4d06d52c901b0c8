"""How fast this machine reads its memory: measured once, and kept."""

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


def read_rate(again: bool = False, file: Path | None = None) -> float:
    """Return bytes a second, of all cores together; takes half a second the first time, or `again`.

    file: where it is kept.
    """
    file = file or cache_folder() / "read-rate.json"
    machine = f"{platform.node()} {platform.machine()} {_cores()} cores"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(file.read_text())
        if kept["machine"] == machine and not again:
            return float(kept["bytes_per_s"])
    rate = _measure()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"machine": machine, "bytes_per_s": rate}))
    return rate


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _measure() -> float:
    parts = np.array_split(np.ones(_BYTES // 4, np.float32), _cores())
    best = 0.0
    with ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(_REPEATS):
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, _BYTES / (time.perf_counter() - began))
    return best
