"""Parts of steps whose launches are noted when they run again, and repeated from then on: for what no graph holds."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from triton.runtime import driver

from executor_svc.gpu.launches.noting import NotedLaunches, Noting, Scratch

_log = logging.getLogger(__name__)

_KEPT = 256
"""Parts whose launches are kept: hidden states of 32 layers take some 0.25 MB of the host's memory, others little."""


def stream_now() -> int:
    """Return the handle of the stream on which kernels are launched."""
    active = driver.active
    return int(active.get_current_stream(active.get_current_device()))


class RepeatedParts:
    """Runs parts of steps, for one thread. The first run of a part is as it was, the second is noted."""

    def __init__(self, stream: Callable[[], int] = stream_now, most: int = _KEPT) -> None:
        """stream: returns that of a launch. most: parts whose launches are kept."""
        self._stream, self._most = stream, most
        self._parts: OrderedDict[Hashable, NotedLaunches | None] = OrderedDict()
        self._scratch = Scratch()
        self.usable = True
        """Whether launches are repeated; not if one was found that cannot be, or gave other results."""

    def run(self, part: Hashable, enqueue: Callable[[], object]) -> None:
        """Enqueue a part of a step; what it launches must depend on `part` alone."""
        if not self.usable:
            enqueue()
            return
        key = part, self._stream()
        known = key in self._parts
        noted = self._parts[key] if known else None
        if noted is not None:
            self._parts.move_to_end(key)
            noted.launch()
        elif known:
            self._note(key, enqueue)
        else:
            self._parts[key] = None
            if len(self._parts) > self._most:
                self._parts.popitem(last=False)
            enqueue()

    def probe(self, enqueue: Callable[[], object], result: Tensor) -> None:
        """Compare what a part gives with what its repeated launches give, to the bit; else none are repeated.

        result: what the part writes whole. Raises what the part does when it runs as it is.
        """

        def found() -> Tensor:
            result.fill_(float("nan"))
            self.run(("probe", enqueue), enqueue)
            return result.view(torch.uint8).clone()

        as_it_is = found()
        try:
            noted, repeated = found(), found()
        except Exception:
            _log.warning("launches cannot be repeated", exc_info=True)
            self._refuse("an error")
            return
        if not (torch.equal(as_it_is, noted) and torch.equal(as_it_is, repeated)):
            _log.warning("repeated launches gave other results than the launches before them")
            self._refuse("results differ")

    def _note(self, key: Hashable, enqueue: Callable[[], object]) -> None:
        with Noting(self._scratch) as noting:
            enqueue()
        if noting.refusal is None:
            self._parts[key] = noting.launches()
        else:
            self._refuse(f"{noting.refusal} cannot be repeated")

    def _refuse(self, why: str) -> None:
        self.usable = False
        self._parts.clear()
        _log.info("steps without CUDA graphs find the arguments of each launch anew: %s", why)
