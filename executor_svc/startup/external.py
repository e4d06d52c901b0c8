"""Another rank than 0 that something else than rank 0 has started, on the same machine or on another one."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from dataclasses import replace
from types import FrameType

from cadenza_common.telemetry.logs import report_error
from executor_svc.config import ExecutorConfig
from executor_svc.ranks.connected import introduction
from executor_svc.ranks.hosts.connecting import Connector
from executor_svc.ranks.hosts.credentials import read_credentials
from executor_svc.ranks.hosts.exchange_links import MemberExchanges
from executor_svc.ranks.hosts.handshake import ConnectionPurpose
from executor_svc.ranks.hosts.places import RankPlace
from executor_svc.ranks.links import Frame, Link, watch
from executor_svc.ranks.members import EXIT_RANK, Joined

_log = logging.getLogger("executor_svc.rank")

_AFTER_DRAIN_S = 5.0


def run_member(config: ExecutorConfig, place: RankPlace) -> int:
    """Join rank 0, and follow it until it is gone; returns the exit code. Raises StartError."""
    from executor_svc.startup.member import run
    from executor_svc.startup.rank_checks import threads_of

    told = ToldToStop(config.drain_timeout_s + _AFTER_DRAIN_S)
    config = threads_of(config, place)
    joined, watched = _join(config, place)
    told.joined()

    def end(how: str) -> None:
        if not told.code:
            _log.info("rank 0 has stopped")
        else:
            report_error(f"rank 0 at {place.target} is gone: {how}; this rank ends", "executor_svc")
        sys.stderr.flush()
        os._exit(told.code)

    watch(watched, end)
    end(run(config, joined))
    return told.code


def _join(config: ExecutorConfig, place: RankPlace) -> tuple[Joined, Link]:
    """Return the connections to rank 0, once it has welcomed this rank, and the one to be watched."""
    connector, timeout_s = Connector(place, read_credentials(config)), config.rank_connect_timeout_s
    link = connector.connect(ConnectionPurpose.STEPS, timeout_s)
    link.end.settimeout(timeout_s)  # rank 0 waits for others, too
    assert config.num_threads is not None
    link.send(Frame.CONFIG, json.dumps(introduction(config, config.num_threads)).encode())
    joined = Joined(place.rank, place.local_size, link, MemberExchanges(connector))
    joined.expect(Frame.WELCOME)
    link.end.settimeout(None)
    watched = connector.connect(ConnectionPurpose.WATCH, timeout_s)
    return replace(joined, adapter_link=connector.connect(ConnectionPurpose.ADAPTERS, timeout_s)), watched


class ToldToStop:
    """What signals do to a rank: at first they end it; once it has joined, rank 0 decides when all stop.

    A group gets its signal in every process, and rank 0 finishes its work first. A second signal, or a rank 0 that goes
    on for long, ends this process.
    """

    def __init__(self, limit_s: float) -> None:
        """limit_s: how long rank 0 may go on."""
        self._limit_s = limit_s
        self._joined = self._told = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    @property
    def code(self) -> int:
        """The exit code when rank 0 is gone."""
        return 0 if self._told else EXIT_RANK

    def joined(self) -> None:
        """From now on rank 0 decides."""
        self._joined = True

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._told or not self._joined:
            os._exit(0)
        self._told = True
        timer = threading.Timer(self._limit_s, os._exit, (0,))
        timer.daemon = True
        timer.start()
