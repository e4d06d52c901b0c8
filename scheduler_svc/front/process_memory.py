"""Resident memory of this process, and its garbage collections."""

from __future__ import annotations

import ctypes
import gc
import os
import threading

LONG_PROMPT_TOKENS = 8192
"""The garbage collector's walk over the lists of a longer prompt takes 0.1 ms or more."""
_NEW_OBJECTS = 10_000
"""Objects that are new, and not freed since, at which they are collected: walking over one takes 0.15 us."""
_YOUNG_COLLECTIONS = 1
"""Collections of new objects after which their survivors are walked over once more; each adds 10,000 to that walk."""
_LEFT_OUT_ENOUGH = 50
"""Collections whose survivors were left out before an idle process walks over all of them again."""
_LEFT_OUT_AT_MOST = 1000
"""The same for a process that is never idle: cycles among so many survivors may fill some 100 MB."""


def resident_bytes() -> int:
    """Resident memory in bytes; 0 on systems without /proc/self/statm."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


_num_left_out = 0
"""Collections whose survivors were left out since all objects were walked over."""


def shorten_collections() -> None:
    """Keep the garbage collector's walks short and rare, from now on: what has survived two of them is left out.

    A walk over everything takes 50 ms with the libraries alone, and as long again for a dozen prompts of 131,072 ids,
    during which the event loop stands still. Objects that are left out are freed when nothing refers to them any more.
    Only cycles are not: ended requests are in none (tests/scheduler_svc/engine/test_ended_requests.py), and gRPC makes
    one of five objects a call, which lives for a moment. `release_free_memory` finds the others.
    """
    collect_rarely()
    gc.freeze()
    if _leave_out_survivors not in gc.callbacks:
        gc.callbacks.append(_leave_out_survivors)


def collect_rarely() -> None:
    """Let the garbage collector look for cycles among new objects rarely, and in pieces that take 2 ms or less.

    A step in which 200 requests join and 200 end makes some 3,000 objects and frees as many, without a cycle. The
    default threshold, 700 more than were freed, would be crossed four times in each such step.
    """
    gc.set_threshold(_NEW_OBJECTS, _YOUNG_COLLECTIONS, 10)


def leave_out_long_prompt(num_tokens: int) -> None:
    """Leave out all present objects, if a prompt of this length has just been added to them."""
    if num_tokens >= LONG_PROMPT_TOKENS and _leave_out_survivors in gc.callbacks:
        gc.freeze()


def _leave_out_survivors(phase: str, info: dict[str, int]) -> None:
    global _num_left_out
    if phase != "stop" or info["generation"] == 0:
        return
    if _num_left_out < _LEFT_OUT_AT_MOST:
        gc.freeze()
        _num_left_out += 1
    else:
        _take_in_survivors()


def _take_in_survivors() -> None:
    """Let the next full collection walk over all objects."""
    global _num_left_out
    gc.unfreeze()
    _num_left_out = 0


def release_free_memory() -> None:
    """Return free memory to the operating system, as far as the allocators can; takes 1 to 5 ms.

    A full collection empties the interpreter's lists of spare objects, each of which may hold a whole arena. glibc's
    malloc_trim returns free pages in the middle of its heap, in a thread, since that takes some ms more and needs no
    interpreter; other C libraries have none, or need none. Now and then the collection includes what was left out of
    earlier ones, and takes 50 ms or more.
    """
    if _num_left_out >= _LEFT_OUT_ENOUGH:
        _take_in_survivors()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        threading.Thread(target=trim, args=(0,), name="malloc-trim", daemon=True).start()
