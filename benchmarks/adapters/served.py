"""Services with adapters as processes, and batches whose requests name them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.burst_client import generate_burst, local_services
from benchmarks.common.rows import BenchmarkError
from benchmarks.common.workload import Request
from cadenza import Client, LocalServices

_POLL_S = 0.2
_LOADED_LIMIT_S = 600.0

Names = Sequence[str | None] | None
"""The adapter of each request; None: of none of them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What requests sent at once gave."""

    tokens: list[list[int]]
    wall_s: float
    """From the first one sent to the last one ended."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return sum(map(len, self.tokens)) / self.wall_s


@dataclass(frozen=True, slots=True)
class Serving:
    """Both services."""

    services: LocalServices

    def serve(self, requests: Sequence[Request], names: Names = None) -> Batch:
        """Send all requests at once over one session, greedy; raises BenchmarkError for an output of a wrong length."""
        return Batch(*asyncio.run(generate_burst(self.services.target, requests, names)))


@contextlib.contextmanager
def serving(model: Path, folders: Mapping[str, Path], **options: Any) -> Iterator[Serving]:
    """The services with these adapters, as many of them loaded as can be. Without any the executor has no places."""
    if not folders:
        options["max_loras"] = 0
    lora = [f"{name}={folder}" for name, folder in folders.items()]
    with local_services(model, **({"lora": lora} if lora else {}), **options) as services:
        if folders:
            _wait_loaded(services.target, min(len(folders), options["max_cpu_loras"]))
        yield Serving(services)


def _wait_loaded(target: str, count: int) -> None:
    """Wait until so many adapters are loaded; raises BenchmarkError for one that cannot be."""
    deadline = time.monotonic() + _LOADED_LIMIT_S
    with Client(target) as client:
        while True:
            found = client.adapters()
            if failed := next((each for each in found if each.error), None):
                raise BenchmarkError(f"{failed.name} cannot be loaded: {failed.error}")
            if sum("loaded" in each.executors.values() for each in found) >= count:
                return
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{count} adapters were not loaded within {_LOADED_LIMIT_S:.0f} s")
            time.sleep(_POLL_S)
