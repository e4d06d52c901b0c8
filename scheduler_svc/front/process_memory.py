"""Resident memory of this process."""

from __future__ import annotations

import os


def resident_bytes() -> int:
    """Resident memory in bytes; 0 on systems without /proc/self/statm."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
