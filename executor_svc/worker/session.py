"""Sessions of the worker: one for each plan stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

from cadenza_common.plan.result import StepResult

_ANNOUNCEMENT_S = 1.0
"""Maximum time that the announcement of a step may take."""
_SENDING_S = 0.005
"""gRPC reports a message as written when it is about to pass it to the socket."""


class PlanSession:
    """The session of one plan stream, opened and closed by the worker.

    Only the device thread changes failed, failed_running and last_step_id.
    """

    def __init__(
        self, epoch: int, on_result: Callable[[StepResult], None], announce: Callable[[int], Future[None]] | None = None
    ) -> None:
        self.epoch = epoch
        # The epoch since which every session was of the same scheduler.
        self.sole_since_epoch = epoch
        self.on_result = on_result
        self.announce = announce
        self.closed = False
        self.failed = False
        # Whether a step has failed after its launch.
        self.failed_running = False
        self.num_unanswered = 0
        self.last_step_id: int | None = None

    def announce_step(self, step_id: int) -> None:
        """Report that a step begins, and wait until the report is on its way: the process may not survive the step."""
        if self.announce is None or self.closed:
            return
        try:
            self.announce(step_id).result(_ANNOUNCEMENT_S)
        except (TimeoutError, CancelledError):
            # The step runs all the same. If it ends the process, its begin is not known.
            return
        time.sleep(_SENDING_S)


@dataclass(frozen=True, slots=True)
class RejectedPlan:
    """An unreadable plan; its answer, in order, is INVALID_PLAN."""

    step_id: int
    message: str


@dataclass(frozen=True, slots=True)
class Activity:
    """The current work of the device thread. step_id 0: no step runs."""

    step_id: int
    age_ns: int
    num_queued: int
