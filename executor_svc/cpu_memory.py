"""This machine's free memory for a model on the CPU, less what other executors have promised to their pools."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from cadenza_common.run_files import cache_folder, read_runs, remove_run, write_run

_KIND = "executors"
FAMILY = "_CADENZA_FAMILY"
"""A variable with the `family` of a process that another has started."""
_promise: Path | None = None
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat"),  # cgroup v2
    # v1, whose "no limit" is a huge number
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
_PAGES_OF_FILES = ("inactive_file", "active_file"), ("total_inactive_file", "total_active_file")
"""In a container's statistics, of v2 and v1."""


def free_memory_bytes() -> int:
    """Return the bytes that are free, of the machine or of the container's limit, less what others have promised.

    Memory of a pool counts as used by the system only once it is written to, block by block.
    """
    available = int(psutil.virtual_memory().available)
    limited = cgroup_free_bytes()
    available = available if limited is None else min(available, limited)
    return max(0, available - _promised_bytes())


def cgroup_free_bytes(root: Path = _CGROUP) -> int | None:
    """Return the bytes left of the container's memory limit, or None without a limit.

    Pages of files count as left, as they do for the machine: the system takes them back. A checkpoint that was read may
    have filled the container with them, and experts that stay in their files are nothing else.
    """
    for (limit_file, used_file, statistics), names in zip(_CGROUP_FILES, _PAGES_OF_FILES, strict=True):
        try:
            limit, used = (int((root / name).read_text()) for name in (limit_file, used_file))
        except (OSError, ValueError):  # "max" is no number
            continue
        return max(0, limit - max(0, used - _sum_of(root / statistics, names)))
    return None


def _sum_of(statistics: Path, names: tuple[str, ...]) -> int:
    """Return the sum of numbers in a file of names and numbers; 0 for those that it lacks."""
    try:
        found = dict(line.split() for line in statistics.read_text().splitlines())
        return sum(int(found.get(name, 0)) for name in names)
    except (OSError, ValueError):
        return 0


def promise_memory(size: int) -> None:
    """Let other executors of this user know of a pool of so many bytes that this process has just reserved."""
    global _promise
    remove_run(_promise)
    _promise = write_run(_KIND, {"family": family(), "will_use": _own_bytes(psutil.Process()) + size})


def _own_bytes(process: psutil.Process) -> int:
    """Return the bytes of a process without those that it shares: pages of files come and go."""
    found = process.memory_info()
    return int(found.rss - getattr(found, "shared", 0))


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """In the body, no other executor of this user sizes its pools."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "pools.lock").open("w")
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def family() -> str:
    """Return what the processes of this server have in common, which divide its memory among them elsewhere."""
    return os.environ.get(FAMILY) or str(os.getpid())


def _promised_bytes() -> int:
    """Return what executors of other servers have promised and not used yet."""
    total = 0
    for run in read_runs(_KIND):
        try:
            if run["family"] != family():
                total += max(0, int(run["will_use"]) - _own_bytes(psutil.Process(run["pid"])))
        except (psutil.Error, LookupError, TypeError, ValueError):
            continue
    return total
