"""The engine's side of a change of the model: which requests can go on, and what the front must prepare."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.core.errors import ModelChangedError, PreconditionError
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import RequestSpec
from scheduler_svc.plan_loop.model_change import ModelChange
from scheduler_svc.plan_loop.ports import EngineRequest, ModelDescription

_LOG = logging.getLogger(__name__)


def _accept(_: RequestSpec, __: ModelDescription) -> None:
    """Nothing to check without a front."""


def _replace_nothing(_: int) -> None:
    """Nothing to replace without a front."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """What the front has prepared for a changed model."""

    same_tokens: bool = True
    """Whether both tokenizers have the same tokens; a token id then means the same text."""
    check_request: Callable[[RequestSpec, ModelDescription], None] = _accept
    """Raises PreconditionError for a request that needs what an executor lacks."""
    serve: Callable[[int], None] = _replace_nothing
    """Checks and tokenizes new requests for this model from now on, under this model number."""


class ModelPreparation(Protocol):
    """What the front holds of the model: the tokenizer, and the checks of requests."""

    async def prepare(self, change: ModelChange) -> PreparedModel:
        """Load what the new model needs; changes nothing yet. Raises ModelRefusedError."""

    def prepare_limits(self, model: ModelDescription) -> PreparedModel:
        """Prepare for the same model within other limits; changes nothing yet."""


class ServedModel:
    """Counts the changes of the executor's description, and decides which requests survive them."""

    def __init__(self, core: Scheduler, *, allow_fingerprint_change: bool) -> None:
        self._core = core
        self._allows_other_numerics = allow_fingerprint_change
        self.front: ModelPreparation | None = None
        """None while the front has not opened."""
        self.number = 0
        """Number of changes so far."""
        self._first_valid_number = 0
        """Requests built for an earlier description cannot run any more."""
        self._prepared = PreparedModel()

    async def prepare(self, change: ModelChange) -> PreparedModel:
        """Let the front prepare for a changed model; raises ModelRefusedError."""
        return PreparedModel() if self.front is None else await self.front.prepare(change)

    def adopt(
        self, change: ModelChange, prepared: PreparedModel, requests: list[EngineRequest]
    ) -> list[Exception | None]:
        """Serve the changed model from now on; the lane must have its limits already.

        Returns for each unfinished request the error that ends it; None if it goes on.
        """
        self.number += 1
        self._prepared = prepared
        reason = change.why_requests_end(
            same_tokens=prepared.same_tokens, allows_other_numerics=self._allows_other_numerics
        )
        if reason:
            self._first_valid_number = self.number
            _LOG.warning("%s: %d unfinished requests end", reason, len(requests))
        elif not change.same_numerics:
            _LOG.warning("%s: %d unfinished requests go on", change.other_numerics, len(requests))
        after = change.after
        _LOG.info(
            "the executor at %s came back changed: %s, vocabulary %d, max_model_len %d, %d KV blocks of %d tokens, "
            "%d sequences a step",
            change.target, after.name, after.vocab_size, after.max_model_len, after.num_device_blocks,
            after.block_size, after.max_num_seqs, extra={"executor": change.target},
        )  # fmt: skip
        prepared.serve(self.number)
        misfits = "the executor that came back cannot hold it"
        return [ModelChangedError(reason) if reason else self._misfit(each.spec, after, misfits) for each in requests]

    def adopt_limits(self, model: ModelDescription, requests: list[EngineRequest]) -> list[Exception | None]:
        """Serve the same model within other limits from now on; the core must have them already.

        Returns for each unfinished request the error that ends it; None if it goes on.
        """
        self.number += 1
        self._prepared = PreparedModel() if self.front is None else self.front.prepare_limits(model)
        self._prepared.serve(self.number)
        return [self._misfit(each.spec, model, "no executor that is left can hold it") for each in requests]

    def check(self, request: EngineRequest, model: ModelDescription) -> None:
        """Check a new request that was built before the last change; others were checked as they were built.

        Raises ModelChangedError, PreconditionError.
        """
        if request.model_number is None or request.model_number == self.number:
            return
        if request.model_number < self._first_valid_number:
            raise ModelChangedError("the model changed while the request was tokenized: send it again")
        self._prepared.check_request(request.spec, model)

    def _misfit(self, spec: RequestSpec, model: ModelDescription, reason: str) -> Exception | None:
        """Why an unfinished request can never run on the present executors; None if it can."""
        rejected = self._core.misfit(spec.key)
        if rejected is not None:
            # The request was right when it came, so its error is not INVALID_ARGUMENT.
            return PreconditionError(rejected.field, f"{reason}: {rejected}")
        try:
            self._prepared.check_request(spec, model)
        except PreconditionError as exc:
            return exc
        return None
