"""Opening a session: the epoch that the executor accepts, and an executor that another scheduler holds.

A scheduler that was killed or cut off holds its executor until its lease ends, 2 s after its last message. So a refused
scheduler opens again and again, and stops only when the holder has certainly sent something since: then it is alive.
"""

from __future__ import annotations

import logging

from scheduler_svc.plan_loop.clock import Clock
from scheduler_svc.plan_loop.ports import (
    ExecutorFencedError,
    ExecutorHeldError,
    ExecutorPort,
    PlanStream,
    StaleEpochError,
)

_LOG = logging.getLogger(__name__)
_MAX_EPOCHS = 5
"""Epochs that are tried at once. The second is right unless other openings come in between."""
RETRY_S = 0.1
RENEWED_S = 1.0
"""A holder that was heard later than this after the first refusal is alive: what a dead one sent arrives earlier."""


async def open_session(
    executor: ExecutorPort, clock: Clock, epoch: int, held_at: float | None = None
) -> tuple[PlanStream, int]:
    """Open a session with this epoch, or with the next one that the executor names; returns the session and its epoch.

    Waits while another scheduler holds the executor. Raises ExecutorFencedError if that one is alive,
    ExecutorLostError.

    held_at: when it was last found alive. It is so at once if it was heard later than that, and the log has it already.
    """
    refused_at = None if held_at is None else held_at - RENEWED_S
    while True:
        tried_at = clock.monotonic()
        try:
            return await _open_accepted(executor, epoch)
        except ExecutorHeldError as exc:
            if refused_at is None:
                refused_at = clock.monotonic()
                text, about = "executor %s: %s; waiting for the end of its lease", {"executor": executor.target}
                _LOG.warning(text, executor.target, exc, extra=about)
            if tried_at - exc.silent_s > refused_at + RENEWED_S:
                raise ExecutorFencedError(str(exc)) from exc
        await clock.sleep(RETRY_S)


async def _open_accepted(executor: ExecutorPort, epoch: int) -> tuple[PlanStream, int]:
    for _ in range(_MAX_EPOCHS - 1):
        try:
            return await executor.open(epoch), epoch
        except StaleEpochError as exc:
            epoch = max(epoch + 1, exc.next_epoch)
    return await executor.open(epoch), epoch
