"""The process of a rank other than 0: loads its part of the model, then runs the plans that rank 0 passes on."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from typing import NoReturn, Protocol

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan_wire.reading import plan_from_bytes
from cadenza_common.telemetry import logs
from executor_svc.config import ExecutorConfig
from executor_svc.errors import StartError
from executor_svc.ranks.adapters import serve_adapters
from executor_svc.ranks.links import Frame, Link, LinkClosed
from executor_svc.ranks.members import Joined, SharedMemory
from executor_svc.ranks.processes import end_with
from executor_svc.ranks.steps import MemberRanks
from executor_svc.worker.worker import Launched

_log = logging.getLogger("executor_svc.rank")


def main() -> int:
    """Run a child of rank 0 until that is gone; arguments as those of `ranks.processes.MODULE`."""
    rank, end, adapters_end, memory, parent = map(int, sys.argv[1:])
    end_with(parent)
    # Ctrl-C reaches every process of a terminal, a service manager's signal every process of a service: rank 0, which
    # finishes its work first, decides when all stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = Link(socket.socket(fileno=end))
    _, options = link.receive()
    config = ExecutorConfig(**json.loads(options))
    logs.configure(config.log_level, config.log_format, f"executor_svc rank {rank}")

    joined = Joined(
        rank,
        config.tensor_parallel_size,
        link,
        SharedMemory(memory),
        Link(socket.socket(fileno=adapters_end)),
    )
    try:
        how = run(config, joined)
    except StartError:
        return 1
    _log.info("rank 0 is gone: %s", how)
    return 0


def run(config: ExecutorConfig, joined: Joined) -> str:
    """Load, and follow rank 0 until it is gone; returns how that was noticed.

    Raises StartError, of which rank 0 knows.
    """
    # Imported here, so that the link answers before torch is there.
    from executor_svc.startup.ranks import build_member

    try:
        executor, ranks = build_member(config, joined)
    except StartError as error:
        joined.link.send(Frame.REFUSED, str(error).encode())
        raise
    if executor.adapters is not None:
        assert joined.adapter_link is not None
        served = executor.adapters, joined.adapter_link
        threading.Thread(target=serve_adapters, args=served, daemon=True).start()
    try:
        joined.link.send(Frame.READY)
        follow(executor, ranks)
    except LinkClosed as error:
        return str(error)


class Follower(Protocol):
    """An executor that runs what rank 0 passes on: a `StepExecutor`, or one of a GPU."""

    def clear(self) -> None:
        """As in `worker.Executor`."""
        ...

    def launch(self, plan: StepPlan, received_ns: int) -> Launched:
        """As in `worker.Executor`."""
        ...

    def settle(self, num_steps: int) -> None:
        """Wait until so many steps of the session are done, and take note of what they gave."""
        ...

    def is_lost(self, exc: Exception) -> bool:
        """As in `worker.Executor`."""
        ...


def follow(executor: Follower, ranks: MemberRanks) -> NoReturn:
    """Run plans and sessions as they come; raises LinkClosed when rank 0 ends, and errors after which none can run."""
    while True:
        kind, content = ranks.next_frame()
        if kind == Frame.CLEAR:
            executor.clear()
        elif kind == Frame.SETTLED:
            executor.settle(int.from_bytes(content, "little"))
        elif kind == Frame.PLAN:
            try:
                executor.launch(plan_from_bytes(content), received_ns=0)
            except LinkClosed:
                raise
            except Exception as error:
                if executor.is_lost(error):
                    raise
                # Rank 0 answers for all: this one waits for the next session.
                ranks.refuse(error)
                _log.error("a step has failed", exc_info=error)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
