"""Requests that run, by their ids, so that another call can abort them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from cadenza.errors import CadenzaError
from gateway_svc.http.errors import ApiError
from gateway_svc.scheduler.generation import Generation


class AbortedError(CadenzaError):
    """Another call has aborted the request."""


class RunningRequests:
    """Those of all callers. A caller sees its own alone."""

    def __init__(self) -> None:
        self._generations: dict[tuple[str | None, str], Generation] = {}

    @contextlib.contextmanager
    def kept(self, key: str | None, request_id: str, generation: Generation) -> Iterator[None]:
        """Keep a request while the body runs; one without an id cannot be aborted. Raises ApiError for one of two."""
        if not request_id:
            yield
            return
        name = key, request_id
        if name in self._generations:
            raise ApiError(409, f"request {request_id[:128]!a} runs already")
        self._generations[name] = generation
        try:
            yield
        finally:
            del self._generations[name]

    def abort(self, key: str | None, request_ids: Iterable[str]) -> None:
        """Abort these requests, as far as they run: their streams end with the output so far."""
        for request_id in request_ids:
            generation = self._generations.get((key, request_id))
            if generation is not None:
                generation.end(AbortedError("the request was aborted"))
