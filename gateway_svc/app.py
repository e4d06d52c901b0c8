"""The paths of the gateway."""

from __future__ import annotations

import secrets
from dataclasses import replace

from aiohttp import web

from cadenza.credentials import read_token
from gateway_svc import system
from gateway_svc.anthropic import messages
from gateway_svc.config import GatewayConfig
from gateway_svc.http.bodies.apart import LongBodies
from gateway_svc.http.keys import KeyFile
from gateway_svc.http.reading import LONG_BODIES
from gateway_svc.http.sites import Cors, Sites
from gateway_svc.middleware import answers
from gateway_svc.models import Names
from gateway_svc.openai import chat, completions, models, responses, tokens
from gateway_svc.openapi import add_openapi
from gateway_svc.page.routes import add_page
from gateway_svc.page_starter import PageRights
from gateway_svc.parsing.formats import KnownFormats
from gateway_svc.scheduler.link import SchedulerLink
from gateway_svc.several.door import DoorState, door_paths, give_back_models
from gateway_svc.several.link import LinkToAll
from gateway_svc.several.wire import DoorPlace
from gateway_svc.state import STATE, State


def make_state(config: GatewayConfig, page_rights: PageRights | None = None, door: DoorPlace | None = None) -> State:
    """What the handlers share; on the event loop that is to serve. Raises OptionError for files and TLS.

    page_rights and door: as whoever started this process gives them; a file with a token overrides theirs.
    """
    own_token = None if config.http_token_file is None else read_token(config.http_token_file)
    cors = Cors(config.http_cors_origin)
    keys = _keys("http-api-key-file", config.http_api_key_file)
    admin_keys = _keys("http-admin-key-file", config.http_admin_key_file)
    return (State if door is None else DoorState)(
        config=config,
        link=SchedulerLink(
            config.target,
            reconnect_timeout_s=config.http_reconnect_timeout_s,
            insecure=config.insecure,
            own_token=own_token,
        )
        if door is None
        else LinkToAll(door.socket),
        keys=keys,
        admin_keys=admin_keys,
        names=Names(config.served_model_name),
        formats=KnownFormats(config.tool_call_parser, config.reasoning_parser),
        cors=cors,
        sites=Sites(config, cors),
        page_rights=_page_rights(config, page_rights),
        long_bodies=LongBodies(config.max_body_bytes),
    )


def make_app(state: State) -> web.Application:
    """The application; whoever serves it starts and closes `state.link`."""
    is_door = isinstance(state, DoorState)
    around = [give_back_models, answers] if is_door else [answers]
    app = web.Application(middlewares=around, client_max_size=state.config.max_body_bytes)
    app[STATE], app[LONG_BODIES] = state, state.long_bodies
    app.add_routes(
        [
            *(door_paths() if is_door else _own_paths()),
            web.get("/version", system.version),
            web.post("/v1/completions", completions.completions),
            web.post("/v1/chat/completions", chat.chat_completions),
            web.post("/v1/responses", responses.responses),
            web.post("/v1/responses/input_tokens", responses.input_tokens),
            web.post("/v1/messages", messages.messages),
            web.post("/v1/messages/count_tokens", messages.count_tokens),
            web.post("/tokenize", tokens.tokenize),
            web.post("/detokenize", tokens.detokenize),
        ]
    )
    add_openapi(app)
    if state.config.page:
        add_page(app, state)
    return app


def _own_paths() -> list[web.RouteDef]:
    """Those that concern the one scheduler."""
    return [
        web.get("/health", system.health),
        web.get("/metrics", system.metrics),
        web.get("/v1/models", models.list_models),
        web.get("/v1/models/{name:.+}", models.show_model),
        web.post("/v1/embeddings", system.embeddings),
        web.post("/v1/load_lora_adapter", models.load_adapter),
        web.post("/v1/unload_lora_adapter", models.unload_adapter),
    ]


def _page_rights(config: GatewayConfig, given: PageRights | None) -> PageRights:
    rights = given or PageRights(secrets.token_urlsafe(24))
    return rights if config.page_token_file is None else replace(rights, token=read_token(config.page_token_file))


def _keys(option: str, path: str | None) -> KeyFile | None:
    return None if path is None else KeyFile(option, path)
