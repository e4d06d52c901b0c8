"""Ranks that something else has started, on this machine or on others: they connect to rank 0."""

from __future__ import annotations

import importlib.metadata
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from executor_svc.config import ExecutorConfig
from executor_svc.errors import StartError
from executor_svc.ranks.hosts.exchange_links import LeaderExchanges
from executor_svc.ranks.hosts.handshake import ConnectionPurpose
from executor_svc.ranks.hosts.listener import Listener
from executor_svc.ranks.hosts.places import PlaceError
from executor_svc.ranks.links import Frame, Link, LinkClosed, watch
from executor_svc.ranks.members import Members

_END_S = 2.0
"""For which `how_ended` waits for the watch, which may come after the end of another connection."""
_OWN = {
    "config", "listen", "insecure", "log_level", "log_format", "otlp_traces_endpoint", "metrics_port", "metrics_host",
    "metrics_insecure", "metrics_token_file", "tls_cert", "tls_key", "tls_client_ca", "tls_scheduler_name",
    "max_connections", "max_connections_per_peer", "drain_timeout_s", "step_timeout_s", "rank_port", "rank_secret_file",
    "rank_connect_timeout_s", "save_quantized",
}  # fmt: skip
"""Options that may differ between ranks: most are for rank 0 alone, or name a file of this machine."""


class ConnectedRanks(Members):
    """Ranks 1 and up, once all have connected."""

    exchanges: LeaderExchanges

    def __init__(self, listener: Listener, size: int, own: dict[str, Any], timeout_s: float) -> None:
        """Wait for them; own: rank 0's introduction, which theirs must match. Raises StartError."""
        super().__init__()
        self.exchanges = LeaderExchanges(listener)
        self._listener = listener
        self._watched: list[Link] = []
        self._ends: dict[int, str] = {}
        self._on_death: Callable[[int, str], None] | None = None
        self._changed = threading.Condition()
        deadline = time.monotonic() + timeout_s
        self._peers = [self._meet(rank, size, own, deadline) for rank in range(1, size)]
        for rank in self.ranks:
            adapters, _ = self._take(rank, size, ConnectionPurpose.ADAPTERS, deadline)
            self.adapter_links.append(adapters)

    def meet(self, num_bytes: int) -> None:
        """As in `Members`: connections need no memory."""

    def watch(self, on_death: Callable[[int, str], None]) -> None:
        """As in `Members`."""
        with self._changed:
            self._on_death = on_death
            ended = next(iter(self._ends.items()), None)
        if ended is not None:
            on_death(*ended)

    def stop(self) -> None:
        """As in `Members`: they end when their connections do."""
        self._listener.close()
        self.exchanges.close()
        for link in (*self.links, *self.adapter_links, *self._watched):
            link.close()

    def how_ended(self, rank: int) -> str:
        """As in `Members`."""
        with self._changed:
            self._changed.wait_for(lambda: rank in self._ends, _END_S)
            return self._ends.get(rank, f"at {self._peers[rank - 1]}, it closed its connection")

    def _meet(self, rank: int, size: int, own: dict[str, Any], deadline: float) -> str:
        """Take a rank's first connections, and check that it is like this one; returns where it is."""
        link, peer = self._take(rank, size, ConnectionPurpose.STEPS, deadline)
        try:
            link.limit(max(0.001, deadline - time.monotonic()))  # nobody watches the rank yet
            kind, content = link.receive()
            if kind != Frame.CONFIG:
                raise StartError(f"rank {rank} at {peer} sent {kind.name}")
            wrong = _wrong_in(own, content)
            if wrong is not None:
                link.send(Frame.REFUSED, wrong.encode())
                raise StartError(f"rank {rank} at {peer}: {wrong}")
            link.send(Frame.WELCOME)
            link.limit(None)
        except LinkClosed as error:
            raise StartError(f"rank {rank} at {peer} ended while it started: {error}") from None
        watched, _ = self._take(rank, size, ConnectionPurpose.WATCH, deadline)
        self.links.append(link)
        self._watched.append(watched)
        watch(watched, lambda how: self._gone(rank, f"at {peer}, {how}"))
        return peer

    def _take(self, rank: int, size: int, purpose: ConnectionPurpose, deadline: float) -> tuple[Link, str]:
        try:
            return self._listener.take(rank, purpose, deadline)
        except TimeoutError:
            raise PlaceError(
                f"no connection from rank {rank} at {self._listener.target} within --rank-connect-timeout-s: it is "
                f"started with RANK={rank}, WORLD_SIZE={size} and this MASTER_ADDR"
            ) from None

    def _gone(self, rank: int, how: str) -> None:
        with self._changed:
            is_first = not self._ends
            self._ends[rank] = how
            self._changed.notify_all()
            on_death = self._on_death
        # Whoever waits for it: the system itself may not know yet.
        self.links[rank - 1].close()
        if on_death is not None and is_first:
            on_death(rank, how)


def _wrong_in(own: dict[str, Any], introduced: bytes) -> str | None:
    try:
        return difference(own, json.loads(introduced))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "it does not introduce itself as a rank of this version of Cadenza does"


def introduction(config: ExecutorConfig, num_threads: int) -> dict[str, Any]:
    """Return what a rank says about itself; num_threads: how many threads it will use."""
    options = config.model_dump(mode="json", exclude=_OWN)
    options["num_threads"] = num_threads
    return {"version": importlib.metadata.version("cadenza"), "options": options}


def difference(first: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Return what of another rank does not fit rank 0; None: nothing."""
    if first["version"] != other["version"]:
        return f"it is Cadenza {other['version']}, and rank 0 is {first['version']}"
    ours, theirs = first["options"], other["options"]
    for name in sorted(ours.keys() | theirs.keys()):
        here, there = ours.get(name), theirs.get(name)
        if here != there:
            flag = f"--{name.replace('_', '-')}"
            return f"{flag} is {there} there and {here} at rank 0: all ranks need the same options"
    return None
