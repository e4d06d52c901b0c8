"""Resident memory of this process."""

from __future__ import annotations

import ctypes
import gc
import os
import threading


def resident_bytes() -> int:
    """Resident memory in bytes; 0 on systems without /proc/self/statm."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def release_free_memory() -> None:
    """Return free memory to the operating system, as far as the allocators can; takes 1 to 5 ms.

    A full collection empties the interpreter's lists of spare objects, each of which may hold a whole arena. glibc's
    malloc_trim returns free pages in the middle of its heap, in a thread, since that takes some ms more and needs no
    interpreter; other C libraries have none, or need none.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        threading.Thread(target=trim, args=(0,), name="malloc-trim", daemon=True).start()
