"""Adapters of a divided model: every rank loads its part, or none does."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from executor_svc.models.adapters.places import ModelAdapters
from executor_svc.models.adapters.reading import BaseTable
from executor_svc.ranks.links import Frame, Link, LinkClosed
from executor_svc.worker.adapters import AdapterRefused, LoadedAdapter
from executor_svc.worker.model_adapters import ModelAdapterLoader

_log = logging.getLogger(__name__)


class LeaderAdapters(ModelAdapterLoader):
    """The adapters of rank 0, which the other ranks load and unload when it does.

    One thread asks the others, in order: steps wait neither for a load nor for an unload behind one.
    """

    def __init__(
        self,
        adapters: ModelAdapters,
        max_loaded: int,
        links: Sequence[Link],
        *,
        roots: Sequence[Path] | None = None,
        base_table: BaseTable | None = None,
    ) -> None:
        """links: to ranks 1 and up, others than those of steps."""
        super().__init__(adapters, max_loaded, roots=roots, base_table=base_table)
        self._links = links
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="adapters of ranks")

    def load(self, index: int, name: str, path: str) -> LoadedAdapter:
        """As in `AdapterLoader`."""
        found = super().load(index, name, path)
        request = {"load": index, "name": name, "path": path, "hash": found.content_hash.hex()}
        try:
            refusals = self._asking.submit(self._ask, request).result()
        except LinkClosed as error:
            raise AdapterRefused("invalid", f"adapter {name}: a rank is gone: {error}") from error
        for rank, refusal in enumerate(refusals, 1):
            if refusal:
                self.unload(index)
                raise AdapterRefused("invalid", f"rank {rank}: {refusal}")
        return found

    def unload(self, index: int) -> None:
        """As in `AdapterLoader`."""
        super().unload(index)
        # A LinkClosed of it is of no interest: the end of a rank is the end of this process.
        self._asking.submit(self._ask, {"unload": index})

    def _ask(self, request: dict[str, object]) -> list[str]:
        """Let all other ranks do something; return what each refuses, empty: nothing."""
        for link in self._links:
            link.send(Frame.ADAPTER, json.dumps(request).encode())
        return [link.receive()[1].decode() for link in self._links]


def serve_adapters(loader: ModelAdapterLoader, link: Link) -> None:
    """Load and unload as rank 0 does, until it is gone; in a thread of another rank, beside its steps."""
    while True:
        try:
            _, content = link.receive()
        except LinkClosed:
            return
        request = json.loads(content)
        try:
            refusal = _carry_out(loader, request)
        except AdapterRefused as error:
            refusal = str(error)
        except Exception as error:
            _log.error("adapter %s", request, exc_info=error)
            refusal = f"{type(error).__name__}: {error}"
        link.send(Frame.ADAPTER, refusal.encode())


def _carry_out(loader: ModelAdapterLoader, request: dict[str, object]) -> str:
    if "unload" in request:
        loader.drop(int(str(request["unload"])))
        return ""
    found = loader.load(int(str(request["load"])), str(request["name"]), str(request["path"]))
    if found.content_hash.hex() == request["hash"]:
        return ""
    loader.drop(found.index)
    return f"adapter {request['name']}: its files were changed while ranks read them"
