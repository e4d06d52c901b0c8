"""How much memory this process holds."""

from __future__ import annotations

import os


def resident_bytes() -> int:
    """Bytes of memory resident in this process now; 0 where the system has no /proc that tells."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
