"""The list of models: who asks for one waits here until it is loaded, and holds it until the answer is complete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cadenza_common.spelling import suggestion
from gateway_svc.http.errors import ApiError
from gateway_svc.several.plan import ListedModel, plan
from gateway_svc.several.wire import Bounds, LoadState, ModelStatus

_TICK_S = 0.25
_MAX_NAME = 128
_RETRY_S = 5.0
_BEFORE: Mapping[LoadState, tuple[LoadState, ...]] = {
    LoadState.LOADING: (LoadState.UNLOADED, LoadState.FAILED),
    LoadState.UNLOADING: (LoadState.LOADED,),
}
"""What a model was before an order, by what it is because of it."""


class Roster:
    """The models by name, in the launcher's order; for use on one event loop."""

    def __init__(self, order: Callable[[str, str], None], on_status: Callable[[ListedModel], None]) -> None:
        """order: orders the launcher to load or unload a model; on_status: is told of each change of a state."""
        self._order, self._on_status = order, on_status
        self._models: dict[str, ListedModel] = {}
        self._changed = asyncio.Event()
        self.bounds = Bounds()

    @property
    def models(self) -> Sequence[ListedModel]:
        """All of them."""
        return tuple(self._models.values())

    def find(self, given: str | None) -> ListedModel:
        """The model that a request names, by its name, its path, or a name and an adapter's; raises ApiError."""
        names = ", ".join(self._models)
        if not given:
            if len(self._models) == 1:
                return next(iter(self._models.values()))
            raise ApiError(400, f"model: several models are served: name one of {names}", param="model")
        found = self._models.get(given) or self._models.get(given.partition("/")[0])
        found = found or next((each for each in self._models.values() if each.status.model == given), None)
        if found is None:
            message = f"there is no model {given[:_MAX_NAME]!a}{suggestion(given[:_MAX_NAME], list(self._models))}"
            raise ApiError(404, f"{message}; there are {names}", param="model", code="model_not_found")
        return found

    def update(self, status: ModelStatus) -> None:
        """Note what the launcher says of a model."""
        model = self._models.setdefault(status.name, ListedModel(replace(status, state=LoadState.UNLOADED)))
        before = model.status
        if model.is_ordered and status.state in _BEFORE[before.state]:
            return  # the launcher said it before it heard the order
        model.status, model.is_ordered = status, False
        if status.state is LoadState.LOADED and before.state is not LoadState.LOADED:
            model.loaded_at = model.used_at = time.monotonic()
        if status.state is LoadState.FAILED and before.state is not LoadState.FAILED:
            model.failed_at = time.monotonic()
            model.num_failures += 1
        if status.state is not LoadState.LOADED:
            model.is_leaving, model.num_in_sessions = False, 0
        self._on_status(model)
        self.look()

    def lost(self) -> None:
        """The launcher has gone: what it says at first, when it is back, holds."""
        for model in self._models.values():
            model.is_ordered = False

    async def take(self, model: ListedModel) -> None:
        """Hold a model, loading it first; `give_back` ends that. Raises ApiError if it cannot be had in time."""
        if not model.is_ready:
            await self._wait(model)
        model.num_running += 1

    def give_back(self, model: ListedModel) -> None:
        """End a hold."""
        model.num_running -= 1
        model.used_at = time.monotonic()
        if not model.num_running:
            self.look()

    async def watch(self) -> None:
        """Do what is due as time passes."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.look()

    def look(self) -> None:
        """Do what is due."""
        orders = plan(self._models.values(), self.bounds, time.monotonic())
        for model in orders.leave:
            model.is_leaving = True
        for order, models, state in (
            ("unload", orders.unload, LoadState.UNLOADING),
            ("load", orders.load, LoadState.LOADING),
        ):
            for model in models:
                model.is_ordered = True
                model.status = replace(model.status, state=state, target="", error="")
                self._on_status(model)
                self._order(order, model.status.name)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, model: ListedModel) -> None:
        timeout_s = self.bounds.load_timeout_s
        if not model.num_waiting or model.status.state is LoadState.FAILED:
            model.wanted_at = time.monotonic()
        model.num_waiting += 1
        num_failures = model.num_failures
        try:
            async with asyncio.timeout(timeout_s):
                self.look()
                while not model.is_ready:
                    if model.num_failures != num_failures:
                        message = f"the model {model.status.name} was not loaded: {model.status.error}"
                        raise ApiError(503, message, code="model_not_loaded", retry_after_s=_RETRY_S)
                    await self._changed.wait()
        except TimeoutError:
            raise ApiError(503, self._why_late(model), code="model_not_loaded", retry_after_s=_RETRY_S) from None
        finally:
            model.num_waiting -= 1

    def _why_late(self, model: ListedModel) -> str:
        what = {
            LoadState.LOADING: "it is still being loaded",
            LoadState.LOADED: "its place is needed by another",
            LoadState.UNLOADING: "it is being unloaded",
        }.get(model.status.state, "other models have the memory, and requests")
        seconds = self.bounds.load_timeout_s
        return f"the model {model.status.name} cannot be had within {seconds:g} s (--load-timeout-s): {what}"
