"""Adds executors and takes them away as the load asks for. A thread of its own reads the load."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from cadenza.credentials import authorized, call_metadata, chosen_token
from cadenza.v1 import generation_pb2, generation_pb2_grpc
from cadenza_common.wire.tls import TLS
from cadenza_common.wire.transport import sync_channel
from cadenza_launcher.on_ray.scaling import ReportedLoad, Scaling

_log = logging.getLogger("cadenza.ray")

_LOOK_S = 1.0
_SILENT_S = 30.0
_STOP_S = 5.0
_CALL_TIMEOUT_S = 2.0


class Scaled(Protocol):
    """A changing set of executors."""

    @property
    def num_wanted(self) -> int:
        """Number of executors that run or start; an executor that leaves does not count."""

    @property
    def num_starting(self) -> int:
        """Of these, executors that are not ready."""

    def add(self) -> str:
        """Add an executor, or keep the last one that leaves; returns its name."""

    def begin_to_leave(self) -> str | None:
        """Let an executor be drained; returns its name."""

    def finish_leaving(self, targets: frozenset[str]) -> list[str]:
        """End the leaving executors that the scheduler has forgotten; returns their names."""


class Scaler:
    """Looks at the load once a second."""

    def __init__(
        self, executors: Scaled, scaling: Scaling, read: Callable[[], Report | None], on_event: Callable[[str], None]
    ) -> None:
        """read: asks the scheduler; None: it says nothing."""
        self._executors, self._scaling, self._read, self._on_event = executors, scaling, read, on_event
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scaler", daemon=True)
        self._heard_at = time.monotonic()
        self._is_silent = False

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Stop looking."""
        self._stopping.set()
        self._thread.join(_STOP_S)

    def look(self, now: float) -> None:
        """Do what the load asks for."""
        report = self._read()
        self._note_silence(report, now)
        if report is None:
            return
        executors = self._executors
        for name in executors.finish_leaving(report.targets):
            self._on_event(f"{name} has no requests left and is taken away")
        count = executors.num_wanted
        wanted = self._scaling.wanted(count, executors.num_starting, report.load, now)
        for _ in range(wanted - count):
            self._on_event(f"{executors.add()} is added: {report.load}")
        if wanted < count and (leaving := executors.begin_to_leave()) is not None:
            self._on_event(f"{leaving} is drained: {report.load}")

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            try:
                self.look(time.monotonic())
            except Exception:  # of Ray, which has many; the executors that there are serve on
                _log.exception("the number of executors stays as it is for now")

    def _note_silence(self, report: Report | None, now: float) -> None:
        """Say once that nothing is known of the load, as from a scheduler with tenants to one who is no admin."""
        if report is not None:
            self._heard_at, self._is_silent = now, False
        elif now - self._heard_at > _SILENT_S and not self._is_silent:
            self._is_silent = True
            text = "the scheduler tells nothing of its load: the number of executors stays"
            self._on_event(f"{text}; with tenants, CADENZA_TOKEN must be that of one with admin = true")


@dataclass(frozen=True, slots=True)
class Report:
    """What the scheduler says of itself and of its executors."""

    load: ReportedLoad
    targets: frozenset[str]
    """Addresses of the executors that it has."""


class LoadReader:
    """Asks a scheduler. With tenants, CADENZA_TOKEN must be the token of one with admin = true."""

    def __init__(self, scheduler: Callable[[], str], tls: TLS | None) -> None:
        """scheduler: gives its address. Raises OptionError for a token that cannot be one."""
        self._scheduler, self._tls = scheduler, tls
        self._metadata = call_metadata(chosen_token(None))

    def read(self) -> Report | None:
        """Return the report; None: it does not answer, or tells this program nothing of its executors."""
        with sync_channel(self._scheduler(), self._tls) as channel:
            stub = authorized(generation_pb2_grpc.GenerationServiceStub(channel), self._metadata)
            try:
                info = stub.GetServerInfo(generation_pb2.GetServerInfoRequest(), timeout=_CALL_TIMEOUT_S)
            except grpc.RpcError:
                return None
        if not info.executors:
            return None
        num_requests = info.load.num_running + info.load.num_waiting + info.load.num_swapped
        most = max(each.max_num_seqs for each in info.executors)
        targets = frozenset(each.target for each in info.executors)
        return Report(ReportedLoad(num_requests, info.load.num_waiting, most), targets)
