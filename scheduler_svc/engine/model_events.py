"""What a change of the served model means for the unfinished requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from scheduler_svc.core.errors import ModelChangedError
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import RequestKey
from scheduler_svc.engine.journal import Journal
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.served_model import PreparedModel, ServedModel
from scheduler_svc.plan_loop.model_change import ModelChange
from scheduler_svc.plan_loop.ports import EngineRequest, ModelDescription


class ModelEvents:
    """Ends the requests that cannot go on with a changed model or other limits. Implements ModelListener."""

    def __init__(
        self,
        core: Scheduler,
        served_model: ServedModel,
        journal: Journal,
        unfinished: Mapping[RequestKey, LiveRequest],
        fail: Callable[[LiveRequest, Exception], None],
    ) -> None:
        """unfinished: the engine's own, which changes. fail: ends an unfinished request with an error."""
        self._core = core
        self._served_model = served_model
        self._journal = journal
        self._unfinished = unfinished
        self._fail = fail

    async def prepare_model(self, change: ModelChange) -> Callable[[], None]:
        """Let the front prepare for a changed model; returns the call that adopts it. Raises ModelRefusedError."""
        return partial(self._adopt, change, await self._served_model.prepare(change))

    def _adopt(self, change: ModelChange, prepared: PreparedModel) -> None:
        """Serve the changed model, and end the requests that cannot go on with it; their output stays readable."""
        self._end_misfits(partial(self._served_model.adopt, change, prepared))
        if not change.same_numerics:
            self._journal.on_other_numerics(change.after)

    def on_limits(self, model: ModelDescription) -> None:
        """Check new requests against other limits, and end the unfinished ones that no executor can hold any more."""
        self._end_misfits(partial(self._served_model.adopt_limits, model))

    def _end_misfits(self, adopt: Callable[[list[EngineRequest]], list[Exception | None]]) -> None:
        """Adopt a model or limits, and end the unfinished requests for which that gives an error."""
        unfinished = list(self._unfinished.values())
        for live, error in zip(unfinished, adopt([live.request for live in unfinished]), strict=True):
            if error is not None:
                self._fail(live, error)

    def on_stranded(self, reason: str) -> None:
        """End the requests with output that no executor can go on with any more."""
        for key in self._core.stranded:
            self._fail(self._unfinished[key], ModelChangedError(reason))

    @property
    def max_logprobs_in_use(self) -> int:
        """The largest number of logprobs that an unfinished request wants."""
        samplings = [live.request.spec.sampling for live in self._unfinished.values()]
        return max((max(each.num_logprobs or 0, each.num_prompt_logprobs or 0) for each in samplings), default=0)
