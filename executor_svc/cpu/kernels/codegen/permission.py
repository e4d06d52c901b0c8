"""The system's permission to use tiles (AMX), which a process requests before its first tile instruction.

Linux keeps 8 KiB of tile data for each thread that uses tiles, so it grants them by request only
(Documentation/arch/x86/xstate.rst). The permission is the process's, for all threads and for later children.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable

_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XTILEDATA = 18


def tiles_permitted() -> bool:
    """Request tiles for this process; return whether the system grants them."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    syscall = ctypes.CDLL(None).syscall
    syscall.argtypes, syscall.restype = [ctypes.c_long] * 3, ctypes.c_long
    return request_tiles(syscall)


def request_tiles(syscall: Callable[[int, int, int], int]) -> bool:
    """Request tiles by arch_prctl of 64-bit x86; syscall(number, arguments…) returns 0 if the kernel agrees."""
    return syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0
