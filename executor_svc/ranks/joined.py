"""What a rank other than 0 knows about its replica after it has joined."""

from __future__ import annotations

from dataclasses import dataclass

from executor_svc.errors import StartError
from executor_svc.ranks.links import Frame, Link, LinkClosed
from executor_svc.ranks.members import Exchanges, SharedMemory


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
