"""Which model the executors serve together, and which executor may join them.

The first executor that answers defines the served model. Another one joins if its model is the same. An executor with
another model is refused while one of the others serves. If none has served for CHANGE_AFTER_S, its model replaces the
served one, as a single executor's does when it comes back changed (decisions 0014 and 0023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine.fleet.executor_member import ExecutorMember
from scheduler_svc.plan_loop.clock import Clock
from scheduler_svc.plan_loop.fleet_model import fleet_model, why_other_model
from scheduler_svc.plan_loop.listener import AdoptModel
from scheduler_svc.plan_loop.model_change import ModelChange, ModelRefusedError, model_change
from scheduler_svc.plan_loop.ports import ModelDescription

CHANGE_AFTER_S = 2.0
"""A served model is replaced only after no executor has served it for so long: one that loses its session for a moment
must not end every request because another executor waits with another model."""


class ModelListener(Protocol):
    """Receives changes of the served model."""

    async def prepare_model(self, change: ModelChange) -> Callable[[], None]:
        """Prepare for another model, or for changed limits of the single executor; raises ModelRefusedError.

        The result is called once the lane has the new limits.
        """

    def on_limits(self, model: ModelDescription) -> None:
        """An executor has joined or left: the same model is served within these limits."""

    def on_stranded(self, reason: str) -> None:
        """Requests with output that no executor can go on with any more end for this reason."""

    @property
    def max_logprobs_in_use(self) -> int:
        """The largest number of logprobs that an unfinished request wants."""


class ServedExecutors:
    """Decides about descriptions. `members` is the set's own, and changes."""

    model: ModelDescription
    """The served model with the limits of all accepted executors; set by the first one."""

    def __init__(
        self,
        core: Scheduler,
        config: SchedulerConfig,
        clock: Clock,
        listener: ModelListener,
        members: Mapping[int, ExecutorMember],
    ) -> None:
        self._core = core
        self._config = config
        self._clock = clock
        self._listener = listener
        self._members = members
        self._served: ModelDescription | None = None
        self._version = 0
        """Number of changes of the accepted executors."""

    async def check(self, member: ExecutorMember, model: ModelDescription) -> AdoptModel:
        """Prepare for an executor with this description; see PlanLoopListener.check_model."""
        self._check_is_other_process(member, model)
        if self._served is None or not self._replaces(member, model):
            self._check_join(member, model)
            return partial(self._adopt_join, member, model)
        change = model_change(member.target, self.model, model)
        adopt = None if change is None else await self._listener.prepare_model(change)
        return partial(self._adopt_change, member, model, adopt, self._version)

    def on_removed(self, member: ExecutorMember) -> None:
        """An executor was removed: the limits may be smaller without it."""
        self._version += 1
        remaining = self._accepted()
        if not member.accepted or not remaining:
            return
        self._served = remaining[0]
        self._update_limits()
        self._listener.on_stranded(
            f"the executor at {member.target} was removed, and no other has the numerics or features for it"
        )

    def _check_is_other_process(self, member: ExecutorMember, model: ModelDescription) -> None:
        """Raise ModelRefusedError if another member has a session with this process, opens one, or had one just now.

        The process has a second name then, and a session by that name would end the first one.
        """
        lately = self._clock.monotonic() - CHANGE_AFTER_S
        for other in self._members.values():
            has_it = other.loop.claimed == model.incarnation
            lost_it = other.lost_at is not None and other.lost_at > lately and not other.loop.leaving
            had_it = lost_it and other.loop.model is not None and other.loop.model.incarnation == model.incarnation
            if other is not member and (has_it or had_it):
                raise ModelRefusedError(f"it is the executor at {other.target}")

    def _others(self, member: ExecutorMember) -> list[ExecutorMember]:
        return [other for other in self._members.values() if other is not member and other.accepted]

    def _replaces(self, member: ExecutorMember, model: ModelDescription) -> bool:
        """Whether this description replaces the served model, instead of joining those that serve it."""
        others = self._others(member)
        if not others:
            return True
        since = max(float("inf") if other.is_live else other.lost_at or 0.0 for other in others)
        return bool(self._why_unlike(model)) and since + CHANGE_AFTER_S <= self._clock.monotonic()

    def _why_unlike(self, model: ModelDescription) -> str:
        """Why an executor cannot serve beside the others; empty if it can."""
        served = self._served
        assert served is not None
        if reason := why_other_model(served, model):
            return reason
        if self._config.journal is not None and served.is_exact and served.fingerprint != model.fingerprint:
            return (
                f"it has another numerics fingerprint than the served {served.name}, and a journal (--journal) in "
                "exact mode knows one fingerprint only"
            )
        return ""

    def _check_join(self, member: ExecutorMember, model: ModelDescription) -> None:
        """Raise ModelRefusedError if the executor cannot serve beside the others."""
        if self._served is None:
            return
        if reason := self._why_unlike(model):
            raise ModelRefusedError(reason)
        if model.max_logprobs < self.model.max_logprobs:
            in_use = self._listener.max_logprobs_in_use
            if in_use > model.max_logprobs:
                raise ModelRefusedError(
                    f"it returns at most {model.max_logprobs} logprobs, and an unfinished request wants {in_use}: it "
                    "joins once that has ended"
                )

    def _adopt_join(self, member: ExecutorMember, model: ModelDescription, set_limits: Callable[[], None]) -> None:
        # Another one may have been accepted meanwhile.
        self._check_join(member, model)
        before = member.loop.model
        set_limits()
        member.accepted = True
        self._version += 1
        is_first, self._served = self._served is None, self._served or model
        if is_first:
            self.model = model
            return
        self._update_limits(is_other=before is not None and model_change("", before, model) is not None)
        if before is not None and before.fingerprint != model.fingerprint:
            self._listener.on_stranded(
                f"the executor at {member.target} came back with another numerics fingerprint, and no other has the "
                "former one; --allow-fingerprint-change on the scheduler lets requests go on"
            )

    def _adopt_change(
        self,
        member: ExecutorMember,
        model: ModelDescription,
        adopt: Callable[[], None] | None,
        version: int,
        set_limits: Callable[[], None],
    ) -> None:
        if version != self._version:
            raise ModelRefusedError("other executors have joined or left meanwhile")
        set_limits()
        member.accepted = True
        self._version += 1
        for other in self._others(member):
            other.accepted = False
        self._served = self.model = model
        if adopt is not None:
            adopt()

    def _accepted(self) -> list[ModelDescription]:
        models = (member.loop.model for member in self._members.values() if member.accepted)
        return [model for model in models if model is not None]

    def _update_limits(self, *, is_other: bool = False) -> None:
        """Let requests be checked against the limits that the accepted executors have now.

        is_other: one has other limits than before, and what fitted it alone may fit none, whatever all have together.
        """
        assert self._served is not None
        before, self.model = self.model, fleet_model(self._served, self._accepted())
        if is_other or model_change("", before, self.model) is not None:
            self._listener.on_limits(self.model)
