"""Whether an executor that just died had completed a step, as its scheduler knows."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from cadenza.v1 import generation_pb2, generation_pb2_grpc
from cadenza_common.wire.tls import TLS
from cadenza_common.wire.transport import sync_channel

_TIMEOUT_S = 1.0


class ExecutorProgress:
    """Reads the scheduler's GetServerInfo after the death of an executor.

    Until the next session is open, it still describes the process that died. `target` gives the scheduler's address,
    `executor` that of the executor.
    """

    def __init__(self, target: Callable[[], str], executor: Callable[[], str], tls: TLS | None = None) -> None:
        self._target = target
        self._executor = executor
        self._tls = tls
        self._counted = 0

    def completed_step(self) -> bool:
        """Whether the last executor at the address completed a step; True once for each incarnation.

        False if the scheduler does not answer within a second: then the executor counts as one without progress.
        """
        with sync_channel(self._target(), self._tls) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            try:
                info = stub.GetServerInfo(generation_pb2.GetServerInfoRequest(), timeout=_TIMEOUT_S)
            except grpc.RpcError:
                return False
        for executor in info.executors:
            if executor.target == self._executor() and executor.last_step_id > 0:
                is_new, self._counted = executor.incarnation != self._counted, executor.incarnation
                return is_new
        return False
