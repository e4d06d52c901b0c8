"""The paths of a gateway of several models: each request is served as by a gateway of its model alone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from aiohttp import web

from cadenza.errors import CadenzaError
from cadenza.info import ModelInfo
from cadenza_common.call_formats.names import ReasoningOption, ToolOption
from gateway_svc.http.errors import ApiError
from gateway_svc.http.reading import PAYER, api_key, read_body
from gateway_svc.metrics import metrics_text
from gateway_svc.models import Chosen, Names
from gateway_svc.parsing.formats import KnownFormats
from gateway_svc.scheduler.caller import SchedulerCaller
from gateway_svc.scheduler.link import SchedulerLink
from gateway_svc.several.link import LinkToAll
from gateway_svc.several.plan import ListedModel
from gateway_svc.several.roster import Roster
from gateway_svc.state import STATE, A, State

_STARTED = int(time.time())
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_HELD = web.RequestKey("held_model", ListedModel)
"""Of a request: the model that it holds until its answer is complete."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class DoorState(State):
    """Of a gateway of several models."""

    def __post_init__(self) -> None:
        self.all.make = self._serving

    @property
    def all(self) -> LinkToAll:
        """The link, as what it is here."""
        return cast(LinkToAll, self.link)

    @property
    def roster(self) -> Roster:
        """The list of models."""
        return self.all.roster

    def check_room(self) -> None:
        """Also while nobody can say which models there are."""
        State.check_room(self)  # super() does not work in a dataclass with slots
        if self.link.is_away:
            raise ApiError(503, "the models cannot be loaded: their launcher is away", code="unavailable")

    async def asked(
        self, request: web.Request, read: Callable[[Mapping[str, Any]], A], *, generates: bool = True
    ) -> tuple[A, State, SchedulerCaller]:
        """As of one model; it is loaded first if need be, and then held."""
        if generates:
            self.check_room()
        self.check_key(request)
        request[PAYER] = await self.payer(api_key(request), request.remote)
        asked = await read_body(request, read)
        model = self.roster.find(asked.model)
        await self.roster.take(model)
        request[_HELD] = model
        state = self.all.served[model.status.name]
        return asked, state, await (state.generating_with(None) if generates else state.caller_with(None))

    def _serving(self, model: ListedModel) -> State:
        """What serves a model that is loaded."""
        config, options = self.config, model.status.options
        link = SchedulerLink(
            model.status.target, reconnect_timeout_s=config.http_reconnect_timeout_s, insecure=config.insecure
        )
        formats = KnownFormats(
            cast(ToolOption, options.get("tool_call_parser", config.tool_call_parser)),
            cast(ReasoningOption, options.get("reasoning_parser", config.reasoning_parser)),
        )
        shared = {each.name: getattr(self, each.name) for each in fields(State)}
        return State(**{**shared, "keys": None, "link": link, "names": _OwnNames(model), "formats": formats})

    def check_key(self, request: web.Request) -> None:
        """Raise the ApiError of a key that is unknown, before anything is loaded."""
        if self.keys is not None:
            self.keys.check(api_key(request))


class _OwnNames(Names):
    """The names of one of several models: its own, its path, and with a slash behind it those of its adapters."""

    def __init__(self, model: ListedModel) -> None:
        super().__init__([model.status.name])
        self._name, self._path = model.status.name, model.status.model

    def choose(self, given: str | None, info: ModelInfo) -> Chosen:
        """What a request's `model` means; raises ApiError."""
        if given is not None and given != self._path and given.startswith(f"{self._name}/"):
            return replace(super().choose(given.removeprefix(f"{self._name}/"), info), name=given)
        return Chosen(self._name, "")


@web.middleware
async def give_back_models(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Let a model be unloaded again when the answer is complete, or its client has gone."""
    try:
        return await handler(request)
    finally:
        if (model := request.get(_HELD)) is not None:
            _state(request).roster.give_back(model)


def door_paths() -> list[web.RouteDef]:
    """The paths that concern all models."""
    return [
        web.get("/health", health),
        web.get("/metrics", metrics),
        web.get("/v1/models", list_models),
        web.get("/v1/models/{name:.+}", show_model),
        web.post("/v1/embeddings", embeddings),
    ]


async def health(request: web.Request) -> web.Response:
    """200 while models can be loaded, even if none is."""
    _state(request).check_room()
    return web.Response()


async def metrics(request: web.Request) -> web.Response:
    """The gateway's metrics; each scheduler has its own."""
    state = _state(request)
    state.check_key(request)
    link = state.all
    text = await asyncio.to_thread(metrics_text, state.counts.copy(), link.num_requests, link.is_serving)
    return web.Response(body=text, headers={"Content-Type": _TEXT})


async def list_models(request: web.Request) -> web.Response:
    """The models, each once, and where each is between its file and its processes."""
    state = _state(request)
    state.check_key(request)
    return web.json_response({"object": "list", "data": [await _shown(state, each) for each in state.roster.models]})


async def show_model(request: web.Request) -> web.Response:
    """One of them."""
    state = _state(request)
    state.check_key(request)
    return web.json_response(await _shown(state, state.roster.find(request.match_info["name"])))


async def embeddings(request: web.Request) -> web.Response:
    """Refused: the served models generate."""
    _state(request).check_key(request)
    raise ApiError(400, "there are no embeddings: the served models generate text", param="model", code="unsupported")


async def _shown(state: DoorState, model: ListedModel) -> dict[str, Any]:
    """A model as a list has it; nothing is loaded for it."""
    status, served = model.status, state.all.served.get(model.status.name)
    found: dict[str, Any] = {
        "id": status.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "cadenza",
        "root": status.model,
        "parent": None,
        "max_model_len": None,
        "permission": [],
        "state": status.state,
        "memory_bytes": status.memory_bytes,
        "num_running": model.num_running + model.num_in_sessions,
        "num_waiting": model.num_waiting,
        "idle_s": round(time.monotonic() - model.used_at, 1) if model.is_idle else None,
        "error": status.error or None,
    }
    if served is not None and served.link.is_serving:
        with contextlib.suppress(CadenzaError):
            found["max_model_len"] = (await (await served.link.caller(None)).model()).max_model_len
    return found


def _state(request: web.Request) -> DoorState:
    return cast(DoorState, request.app[STATE])
