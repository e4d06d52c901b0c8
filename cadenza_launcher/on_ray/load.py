"""The load of a scheduler, as GetServerInfo reports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc

from cadenza.credentials import authorized, call_metadata, chosen_token
from cadenza.v1 import generation_pb2, generation_pb2_grpc
from cadenza_common.wire.tls import TLS
from cadenza_common.wire.transport import sync_channel
from cadenza_launcher.on_ray.scaling import ReportedLoad

_TIMEOUT_S = 2.0


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
                info = stub.GetServerInfo(generation_pb2.GetServerInfoRequest(), timeout=_TIMEOUT_S)
            except grpc.RpcError:
                return None
        if not info.executors:
            return None
        num_requests = info.load.num_running + info.load.num_waiting + info.load.num_swapped
        most = max(each.max_num_seqs for each in info.executors)
        targets = frozenset(each.target for each in info.executors)
        return Report(ReportedLoad(num_requests, info.load.num_waiting, most), targets)
