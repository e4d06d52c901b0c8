"""What constrains the output, in the words of each API, as SamplingParams' structured_outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cadenza.gateway.fields.field import shown
from cadenza.gateway.http.errors import bad_request

_PLACES = ("structured_outputs", "response_format", "text", "output_config", "output_format")


def output_constraint(values: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The field that has the constraint, and its form for SamplingParams; None: there is none.

    Raises ApiError for a form that is unknown, and for two at once.
    """
    found = {name: each for name in _PLACES if (each := _READERS[name](values.get(name))) is not None}
    if len(found) > 1:
        first, second = list(found)[:2]
        raise bad_request(f"{first} and {second} exclude each other", second)
    return next(iter(found.items()), None)


def _structured_outputs(value: Any) -> dict[str, Any] | None:
    return None if value is None or not any(each is not None for each in value.values()) else dict(value)


def _response_format(value: Any) -> dict[str, Any] | None:
    """OpenAI's: text, json_object, json_schema; and vLLM's structural_tag."""
    if value is None:
        return None
    inner = value.get("json_schema")
    if value.get("type") == "json_schema":
        if not isinstance(inner, dict):
            raise bad_request("response_format.json_schema must be an object with a schema", "response_format")
        return {"json": _schema(inner, "response_format.json_schema", "response_format")}
    return _plain(value, "response_format", "response_format")


def _text(value: Any) -> dict[str, Any] | None:
    """That of responses: {"format": …}."""
    if value is None:
        return None
    for name in value:
        if name != "format" and value[name] is not None:
            raise bad_request(f"text.{shown(name)} is not supported", "text")
    given = value.get("format")
    if given is None:
        return None
    return _flat(given, "text.format", "text")


def _output_config(value: Any) -> dict[str, Any] | None:
    """Anthropic's: {"format": {"type": "json_schema", "schema": …}}."""
    if value is None:
        return None
    for name in value:
        if name != "format" and value[name] is not None:
            raise bad_request(f"output_config.{shown(name)} is not supported", "output_config")
    return None if value.get("format") is None else _flat(value["format"], "output_config.format", "output_config")


def _output_format(value: Any) -> dict[str, Any] | None:
    """The same, as it was called before."""
    return None if value is None else _flat(value, "output_format", "output_format")


def _flat(value: Any, where: str, param: str) -> dict[str, Any] | None:
    """A format whose schema stands beside its type."""
    if not isinstance(value, dict):
        raise bad_request(f"{where} must be an object, not {shown(value)}", param)
    if value.get("type") == "json_schema":
        return {"json": _schema(value, where, param)}
    return _plain(value, where, param)


def _plain(value: dict[str, Any], where: str, param: str) -> dict[str, Any] | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": value}
    raise bad_request(f"{where}.type must be text, json_object or json_schema, not {shown(kind)}", param)


def _schema(value: dict[str, Any], where: str, param: str) -> Any:
    schema = value.get("schema")
    if not isinstance(schema, (dict, bool)):
        raise bad_request(f"{where}.schema must be a JSON schema, not {shown(schema)}", param)
    return schema


_READERS = {
    "structured_outputs": _structured_outputs,
    "response_format": _response_format,
    "text": _text,
    "output_config": _output_config,
    "output_format": _output_format,
}
