"""The ranks of a replica: the others as rank 0 sees them, whatever has started them, and what another one knows.

They agree on what they hold at the start, and end together.
"""

from __future__ import annotations

import json
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor_svc.errors import StartError
from executor_svc.ranks.hosts.exchange_links import ExchangeLinks
from executor_svc.ranks.links import Frame, Link, LinkClosed

EXIT_RANK = 5
"""Exit code of a rank that has lost another one."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A file in memory."""

    descriptor: int

    def map(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return it, once it has this size; all zeros at first. It lives as long as the array."""
        return np.frombuffer(mmap.mmap(self.descriptor, num_bytes), np.uint8)


Exchanges = SharedMemory | ExchangeLinks
"""What ranks exchange rows through."""


class Members(ABC):
    """Ranks 1 and up, once they are there."""

    exchanges: Exchanges

    def __init__(self) -> None:
        self.links: list[Link] = []
        """Of steps, and of all before the first; in the order of ranks."""
        self.adapter_links: list[Link] = []

    @abstractmethod
    def meet(self, num_bytes: int) -> None:
        """Let the others begin with exchanges that take so many bytes of shared memory. Raises StartError."""

    def agree(
        self, own: dict[str, Any], decide: Callable[[Sequence[dict[str, Any]]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return what is decided from what all ranks hold, in the order of ranks; they get it, too.

        Raises StartError, with the reason of a rank that cannot start, or that of `decide`, which the others get.
        """
        held = [own, *(json.loads(self.expect(rank, Frame.HELD)) for rank in self.ranks)]
        try:
            decided = decide(held)
        except StartError as error:
            for link in self.links:
                with suppress(LinkClosed):
                    link.send(Frame.REFUSED, str(error).encode())
            raise
        self.tell(Frame.SIZES, json.dumps(decided).encode())
        return decided

    def wait_until_ready(self) -> None:
        """Wait until all ranks wait for plans; raises StartError."""
        for rank in self.ranks:
            self.expect(rank, Frame.READY)

    @abstractmethod
    def watch(self, on_death: Callable[[int, str], None]) -> None:
        """Call on_death once with the first rank that ends, and how; in a thread of its own."""

    @abstractmethod
    def stop(self) -> None:
        """End the other ranks: this one cannot start."""

    @abstractmethod
    def how_ended(self, rank: int) -> str:
        """Return how a rank ended whose link is closed; it may wait for its end."""

    @property
    def ranks(self) -> range:
        """The numbers of the other ranks."""
        return range(1, len(self.links) + 1)

    def tell(self, kind: Frame, content: bytes) -> None:
        """Send a frame to all; raises StartError."""
        for rank, link in zip(self.ranks, self.links, strict=True):
            try:
                link.send(kind, content)
            except LinkClosed:
                raise self._ended(rank) from None

    def expect(self, rank: int, wanted: Frame) -> bytes:
        """Wait for a frame of this kind; raises StartError."""
        try:
            kind, content = self.links[rank - 1].receive()
        except LinkClosed:
            raise self._ended(rank) from None
        if kind == Frame.REFUSED:
            raise StartError(f"rank {rank}: {content.decode(errors='replace')}")
        assert kind == wanted, f"rank {rank} sent {kind.name}"
        return content

    def _ended(self, rank: int) -> StartError:
        return StartError(f"rank {rank} ended while it started: {self.how_ended(rank)}")


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank's connections to rank 0."""

    rank: int
    on_host: int
    """Ranks of this machine."""
    link: Link
    """Of steps, and of all before the first."""
    exchanges: Exchanges
    adapter_link: Link | None = None
    """None: not yet."""

    def meet(self, _num_bytes: int) -> None:
        """Wait until exchanges can begin; raises StartError."""
        if isinstance(self.exchanges, SharedMemory):
            self.expect(Frame.MEMORY)

    def expect(self, wanted: Frame) -> bytes:
        """Wait for a frame of this kind from rank 0, at the start; raises StartError."""
        try:
            kind, content = self.link.receive()
        except LinkClosed as error:
            raise StartError(f"rank 0 ended while this rank started: {error}") from None
        if kind == Frame.REFUSED:
            raise StartError(f"rank 0: {content.decode(errors='replace')}")
        assert kind == wanted, f"rank 0 sent {kind.name}"
        return content
