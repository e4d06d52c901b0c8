"""Limits on the memory of a process that runs already, kept by the system."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.service_scripts import until

_GROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited_addresses(pid: int, more_bytes: int) -> Iterator[None]:
    """Inside, the process gets so much more memory at most, and what it asks for beyond that fails."""
    held = psutil.Process(pid).memory_info().vms
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (held + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, before)


@contextlib.contextmanager
def memory_group_or_skip(limit_bytes: int) -> Iterator[Path]:
    """A cgroup whose processes the kernel kills once they have used this much memory since they joined.

    Yields the file that takes their numbers. The test is skipped where no cgroup can be made.
    """
    is_v1 = (_GROUPS / "memory").is_dir()
    group = (_GROUPS / "memory" if is_v1 else _GROUPS) / f"cadenza-test-{os.getpid()}"
    try:
        if not is_v1:
            (_GROUPS / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"no cgroup with a memory limit can be made here: {error}")
    try:
        yield group / "cgroup.procs"
    finally:
        until(lambda: _removed(group))


def _removed(group: Path) -> bool:
    """Remove it, unless a process that was killed is not quite gone."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()
