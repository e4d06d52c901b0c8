"""An executor on Ray: an actor for each of its ranks, and the lives of the processes that the actors run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cadenza_common.wire.transport import parse_address
from cadenza_launcher.on_ray.actor import EXIT_LOST
from cadenza_launcher.on_ray.orders import News, Order
from cadenza_launcher.services.child_process import TAIL_LINES, LogSink

_RETRY_S = 0.2
_WAITING_S = 10.0
_STOP_SPARE_S = 2.0
_LAST_WORDS_S = 1.0
"""For the other ranks to say why they end, once one has."""

Orders = Callable[[Sequence[str]], Sequence[Order]]
"""Gives the orders of all ranks from an address of each rank's machine, with a port that is free there."""


class Replica:
    """The actors of an executor: one for each rank."""

    def __init__(self, name: str, size: int, make_actor: Callable[[int], Any], where: str) -> None:
        """size: number of ranks; make_actor: makes that of a rank; where: what Ray is asked for, for messages."""
        self.name, self.where = name, where
        self._make_actor = make_actor
        self.actors = [make_actor(rank) for rank in range(size)]
        self.dead: set[int] = set()
        """Ranks whose actors Ray does not start again."""
        self.num_lives = 0

    def start(self, orders: Orders, on_log: LogSink, on_change: Callable[[], None]) -> ReplicaLife:
        """Start the processes, and return at once."""
        for rank in self.dead:
            self.actors[rank] = self._make_actor(rank)
        self.dead.clear()
        self.num_lives += 1
        return ReplicaLife(self, self.num_lives, orders, on_log, on_change)


class ReplicaLife:
    """One life of an executor: from the start of its processes until the first of them ends. Implements ExecutorChild.

    An actor or a machine that is lost ends the life: the processes of its other ranks are stopped.
    """

    pid = 0

    def __init__(
        self, replica: Replica, number: int, orders: Orders, on_log: LogSink, on_change: Callable[[], None]
    ) -> None:
        """on_change: called when it has become ready, and when it has ended."""
        self.name = replica.name
        self._replica, self._number, self._orders = replica, number, orders
        self._on_log, self._on_change = on_log, on_change
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._address = ""
        self.host = ""
        """That of rank 0's machine, once Ray has placed it."""
        self._lock = threading.Lock()
        self._code: int | None = None
        self._reason = ""
        self._stopping = threading.Event()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name=self.name, daemon=True).start()

    @property
    def address(self) -> str:
        """`HOST:PORT` of rank 0; empty before it is ready."""
        return self._address

    @property
    def is_ready(self) -> bool:
        """Whether rank 0 has said that it is ready."""
        return bool(self._address)

    @property
    def serves(self) -> bool:
        """Whether it is ready, and has not ended."""
        return self.is_ready and self._code is None

    def exit_code(self) -> int | None:
        """The exit code of the first process that has ended; None: none has."""
        return self._code

    def exit_reason(self) -> str:
        """How it has ended, in one line."""
        return self._reason

    def log_tail(self) -> str:
        """The last lines of the log."""
        return "\n".join(self._tail)

    def kill(self, reason: str) -> None:
        """End the processes; `exit_reason` gives the reason."""
        self._end(EXIT_LOST, reason)

    def begin_stop(self) -> None:
        """Stop the processes, and do not wait."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._stop_all(_STOP_SPARE_S)

    def stop(self, grace_s: float) -> None:
        """Stop the processes; returns when they have exited, or are out of reach."""
        self.begin_stop()
        self._ended.wait(grace_s + _STOP_SPARE_S)

    # --- threads: one for each rank ----------------------------------------------------------------------------------

    def _run(self) -> None:
        orders = self._ask_for_orders()
        if orders is None:
            return
        for rank, order in enumerate(orders):
            threading.Thread(target=self._follow, args=(rank, order), name=f"{self.name} {rank}", daemon=True).start()

    def _ask_for_orders(self) -> Sequence[Order] | None:
        """Wait until all ranks have machines; None: it is to be stopped before that."""
        places = [self._ask(rank, actor.place.remote) for rank, actor in enumerate(self._replica.actors)]
        if None in places:
            return None
        self.host, _ = parse_address(places[0], default_port=0)
        return self._orders(places)

    def _follow(self, rank: int, order: Order) -> None:
        """Start the process of a rank, and take its news until it has ended."""
        import ray

        actor, seen = self._replica.actors[rank], 0
        text = order.to_json()
        self._ask(rank, partial(actor.start.remote, self._number, text))
        name = self.name if len(self._replica.actors) == 1 else f"{self.name} rank {rank}"
        while self._code is None:
            try:
                knows = int(rank > 0 or self.is_ready)
                news = News.from_json(ray.get(actor.news.remote(self._number, seen, knows)))
            except Exception as error:  # of Ray, which has many
                self._end(EXIT_LOST, _lost(rank, len(self._replica.actors), error))
                return
            seen = news.seen
            for line in news.lines:
                self._tail.append(line)
                self._on_log(name, line)
            if rank == 0 and news.address and not self._address:
                self._address = news.address
                self._on_change()
            if news.code is not None:
                of_rank = "" if len(self._replica.actors) == 1 else f"rank {rank}: "
                self._end(news.code, of_rank + news.reason)

    def _ask(self, rank: int, call: Callable[[], Any]) -> Any:
        """Make a call until Ray has a place for the actor; None: this life has ended before that."""
        import ray

        tell_at: float | None = time.monotonic() + _WAITING_S
        while not self._stopping.is_set() and self._code is None:
            try:
                pending = call()
                while not self._stopping.is_set() and self._code is None:
                    if ray.wait([pending], timeout=_RETRY_S)[0]:
                        return ray.get(pending)
                    if tell_at is not None and time.monotonic() > tell_at:
                        tell_at = None
                        self._on_log(self.name, f"Ray has no place yet: {self._replica.where}")
            except ray.exceptions.ActorDiedError as error:  # for good, as when somebody has killed it by Ray
                self._replica.dead.add(rank)
                self._end(EXIT_LOST, _lost(rank, len(self._replica.actors), error))
            except ray.exceptions.RayError:  # the actor is about to be started again
                self._stopping.wait(_RETRY_S)
        if self._stopping.is_set():
            self._end(0, "stopped")
        return None

    def _end(self, code: int, reason: str) -> None:
        with self._lock:
            if self._code is not None:
                return
            self._code, self._reason = code, reason
        self._stop_all(_LAST_WORDS_S)
        self._on_change()
        self._ended.set()

    def _stop_all(self, grace_s: float) -> None:
        for actor in self._replica.actors:
            with contextlib.suppress(Exception):  # of Ray: the actor is gone, or this program has left the cluster
                actor.stop.remote(self._number, round(1000 * grace_s))


def _lost(rank: int, size: int, error: Exception) -> str:
    what = "its Ray actor" if size == 1 else f"the Ray actor of rank {rank}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{what} is gone: {lines[0] if lines else type(error).__name__}"
