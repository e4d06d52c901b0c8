"""GET /v1/models, and vLLM's calls about adapters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from cadenza.errors import FailedPreconditionError, PermissionDeniedError, UnsupportedError
from cadenza.info import ModelInfo
from gateway_svc.fields.reading import read_fields
from gateway_svc.fields.sampling import require, utf8
from gateway_svc.fields.tables import LOAD_ADAPTER, UNLOAD_ADAPTER
from gateway_svc.http.errors import ApiError
from gateway_svc.http.reading import api_key, read_body
from gateway_svc.models import unknown_model
from gateway_svc.scheduler.caller import SchedulerCaller
from gateway_svc.state import STATE, State

_STARTED = int(time.time())


async def list_models(request: web.Request) -> web.Response:
    """The model by its names, and the adapters that the caller may see."""
    state = request.app[STATE]
    caller = await state.caller(request)
    return web.json_response({"object": "list", "data": await _models(state, caller)})


async def show_model(request: web.Request) -> web.Response:
    """One of them."""
    state = request.app[STATE]
    caller = await state.caller(request)
    name = request.match_info["name"]
    for model in await _models(state, caller):
        if model["id"] == name:
            return web.json_response(model)
    raise unknown_model(name, state.names.of_model(await caller.model())[0])


async def _models(state: State, caller: SchedulerCaller) -> list[dict[str, Any]]:
    info = await caller.model()
    names = state.names.of_model(info)
    models = [_model(name, info.model, None, info) for name in names]
    try:
        adapters = await caller.adapters()
    except (PermissionDeniedError, UnsupportedError, FailedPreconditionError):
        adapters = []  # the caller may use some, and see none
    return models + [_model(each.name, each.path, names[0], info) for each in adapters]


def _model(name: str, root: str, parent: str | None, info: ModelInfo) -> dict[str, Any]:
    """An entry as vLLM has it; `meta` is llama.cpp's, of which load tests read the size of the vocabulary."""
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "cadenza",
        "root": root,
        "parent": parent,
        "max_model_len": info.max_model_len,
        "permission": [],
        "meta": {"n_vocab": info.vocab_size},
    }


async def load_adapter(request: web.Request) -> web.Response:
    """Give an adapter's folder a name."""
    caller = _admin(request)
    name, path = await read_body(request, read_load)
    await caller.load_adapter(name, path)
    return web.Response(text=f"Success: LoRA adapter {name!a} added successfully.")


async def unload_adapter(request: web.Request) -> web.Response:
    """Take an adapter's name away."""
    caller = _admin(request)
    name = await read_body(request, read_unload)
    await caller.unload_adapter(name)
    return web.Response(text=f"Success: LoRA adapter {name!a} removed successfully.")


def _admin(request: web.Request) -> SchedulerCaller:
    """The gateway itself, for a caller with the admin's key; raises ApiError."""
    state = request.app[STATE]
    if state.admin_keys is None:
        message = f"there is no {request.path}: it needs --http-admin-key-file"
        raise ApiError(404, message, code="unknown_path")
    state.admin_keys.check(api_key(request))
    return state.link.own


def read_load(body: Mapping[str, Any]) -> tuple[str, str]:
    """The name that an adapter is to have, and its folder; raises ApiError."""
    values = read_fields(LOAD_ADAPTER, body)
    name = utf8(require(values, "lora_name"), "lora_name")
    return name, utf8(require(values, "lora_path"), "lora_path")


def read_unload(body: Mapping[str, Any]) -> str:
    """The name of the adapter that is to go; raises ApiError."""
    return utf8(require(read_fields(UNLOAD_ADAPTER, body), "lora_name"), "lora_name")
