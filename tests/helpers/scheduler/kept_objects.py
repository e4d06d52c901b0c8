"""Counts the objects in memory that belong to requests: none may stay once its request has ended."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator

from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import RequestSpec
from scheduler_svc.engine.live_request import LiveRequest, LiveSample
from scheduler_svc.plan_loop.ports import EngineRequest

_TYPES = (RequestSpec, EngineRequest, LiveRequest, LiveSample, Sequence, SequenceGroup)


@contextlib.contextmanager
def kept_objects() -> Iterator[Callable[[], Counter[str]]]:
    """Yield a function that counts the requests' objects that were created since, by type.

    The garbage collector is off meanwhile: an object that it would have to find counts as kept.
    """
    gc.collect()
    before = _counts()
    gc.disable()
    try:
        yield lambda: _counts() - before
    finally:
        gc.enable()


def _counts() -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in _TYPES)
