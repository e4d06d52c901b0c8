"""Counts and logs the faults of executors."""

from __future__ import annotations

import logging

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine.faults import FaultKind, Faults
from scheduler_svc.engine.fleet.executor_member import ExecutorMember
from scheduler_svc.plan_loop.ports import ExecutorFencedError, ExecutorLostError, ExecutorStoppedError

_LOG = logging.getLogger("scheduler_svc.engine.fleet.executor_set")


class FaultReport:
    """Receives what happens to executors."""

    def __init__(self, core: Scheduler, faults: Faults) -> None:
        self._core = core
        self._faults = faults
        self._num_suspected = 0

    def on_connected(self, member: ExecutorMember) -> None:
        """A session was opened."""
        if member.has_other_incarnation():
            self._faults.record(FaultKind.EXECUTOR_RESTARTED, member.target)
        self.count_suspects(member)

    def on_lost(self, member: ExecutorMember, error: ExecutorLostError, *, others: bool) -> None:
        """A session ended; `others`: whether another executor takes requests."""
        stopped = isinstance(error, ExecutorStoppedError)
        if not stopped:
            self._faults.record(FaultKind.EXECUTOR_LOST, member.target)
        if member.loop.failed_step_id:
            self._faults.record(FaultKind.STEP_FAILED, member.target)
        self.count_suspects(member)
        until = "go to the others" if others else f"wait for {'its successor' if stopped else 'it'}"
        text = "executor %s: %s; %srequests %s" if stopped else "executor %s lost: %s; %srequests %s"
        level = logging.INFO if stopped else logging.WARNING
        about = {"executor": member.target, "epoch": member.loop.epoch, "step_id": member.loop.failed_step_id or None}
        _LOG.log(level, text, member.target, error, "its " if others else "", until, extra=about)

    def on_progress(self, member: ExecutorMember) -> None:
        """An executor has stalled, or makes progress again."""
        if member.loop.stalled:
            self._faults.record(FaultKind.EXECUTOR_STALLED, member.target)

    def on_refused(self, member: ExecutorMember, error: Exception, *, others: bool) -> None:
        """An executor that answers cannot be used; `others`: whether another executor takes requests."""
        self._faults.record(FaultKind.EXECUTOR_REFUSED, member.target)
        _LOG.error(
            "executor %s cannot be used: %s; requests %s",
            member.target, error, "go to the others" if others else "wait",
            extra={"executor": member.target},
        )  # fmt: skip

    def on_held(self, member: ExecutorMember, error: ExecutorFencedError) -> None:
        """Another scheduler holds an executor."""
        self._faults.record(FaultKind.EXECUTOR_REFUSED, member.target)
        _LOG.error(
            "executor %s: %s; another scheduler uses it, and this one tries again every second",
            member.target, error, extra={"executor": member.target},
        )  # fmt: skip

    def count_suspects(self, member: ExecutorMember) -> None:
        """Count the requests that the core has suspected since the last call, of the death of this executor."""
        new = self._core.num_suspected - self._num_suspected
        if new:
            self._num_suspected += new
            self._faults.record(FaultKind.REQUEST_SUSPECTED, member.target, count=new)
