"""GET /openapi.json: the paths and their fields, for tools that read OpenAPI (https://spec.openapis.org/oas/v3.1.0)."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web

from cadenza import __version__
from gateway_svc.fields.field import Field, Use
from gateway_svc.fields.tables import APIS, REQUIRED

_DOCUMENT = web.AppKey("openapi", bytes)
_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_ERRORS = {
    "Error": {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL},
                "required": ["message", "type", "param", "code"],
            }
        },
        "required": ["error"],
    },
    "AnthropicError": {
        "type": "object",
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "properties": {"type": _TEXT, "message": _TEXT},
                "required": ["type", "message"],
            },
            "request_id": _TEXT,
        },
        "required": ["type", "error"],
    },
}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
KIND_SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "any": {},
    "a string": _TEXT,
    "an integer": {"type": "integer"},
    "a number": {"type": "number"},
    "a boolean": {"type": "boolean"},
    "an object": {"type": "object"},
    "an object of strings": {"type": "object", "additionalProperties": _TEXT},
    "a list": {"type": "array"},
    "a list of strings": {"type": "array", "items": _TEXT},
    "a list of integers": {"type": "array", "items": {"type": "integer"}},
    "a string or a list of strings": {"type": ["string", "array"], "items": _TEXT},
    "a string or an object": {"type": ["string", "object"]},
    "a string or a list": {"type": ["string", "array"]},
}
"""By a kind of field.KINDS."""


def add_openapi(app: web.Application) -> None:
    """Add the path. It describes the paths that the application has so far."""
    app[_DOCUMENT] = json.dumps(_document(app.router.routes()), ensure_ascii=False).encode()
    app.router.add_get("/openapi.json", show_document)


async def show_document(request: web.Request) -> web.Response:
    """The description of all paths."""
    return web.Response(body=request.app[_DOCUMENT], content_type="application/json")


def _document(routes: Iterable[web.AbstractRoute]) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if route.resource is not None and route.method != "HEAD":
            path = route.resource.canonical
            paths.setdefault(path, {})[route.method.lower()] = _operation(path, inspect.getdoc(route.handler) or "")
    return {
        "openapi": "3.1.0",
        "info": {"title": "Cadenza", "version": __version__},
        "paths": paths,
        "components": {"schemas": _ERRORS, "securitySchemes": _KEYS},
        "security": [{}, *({name: []} for name in _KEYS)],
    }


def _operation(path: str, description: str) -> dict[str, Any]:
    """One method of a path; description: its handler's."""
    error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    schema = {"$ref": f"#/components/schemas/{error}"}
    found: dict[str, Any] = {
        "summary": description.partition("\n")[0],
        "responses": {
            "200": {"description": "the answer"},
            "default": {"description": "an error", "content": {"application/json": {"schema": schema}}},
        },
    }
    if "{name}" in path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _TEXT}]
    table = APIS.get(path)
    if table is not None:
        body = body_schema(table, REQUIRED.get(path, ()))
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        if "stream" in table:
            found["responses"]["200"]["description"] += "; with stream=true as server-sent events"
    return found


def body_schema(table: Mapping[str, Field], required: tuple[str, ...]) -> dict[str, Any]:
    """What a body may be, but for what is within its fields."""
    return {
        "type": "object",
        "properties": {field.name: _field_schema(field, field.name in required) for field in table.values()},
        "required": list(required),
        "additionalProperties": False,
    }


def _field_schema(field: Field, is_required: bool) -> dict[str, Any]:
    """One field; null is as if absent."""
    if field.use is Use.REFUSED:
        return {"enum": [*field.neutral, None], "description": f"not supported: {field.ours}"}
    schema = dict(KIND_SCHEMAS[field.kind])
    if "type" in schema and not is_required:
        given = schema["type"]
        schema["type"] = [*(given if isinstance(given, list) else [given]), "null"]
    return {**schema, "description": field.ours}
