"""What constrains the output, in the words of each API, as SamplingParams' structured_outputs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cadenza.errors import FailedPreconditionError, InvalidRequestError
from gateway_svc.fields.field import as_integers, check_keys, shown
from gateway_svc.http.errors import bad_request

_OF_SCHEMAS = ("name", "description", "schema", "strict")
"""Keys beside a schema; name and description change nothing, and every schema is strict."""
_ON_THE_WIRE = "sampling_params.grammar"
_PLACES = ("structured_outputs", "response_format", "text", "output_config", "output_format")


class Constraint(NamedTuple):
    """What constrains an output."""

    field: str = "structured_outputs"
    """The one of the request that has it, or would have it."""
    form: dict[str, Any] | None = None
    """As SamplingParams take it; None: there is none."""


def output_constraint(values: Mapping[str, Any]) -> Constraint:
    """The constraint of a request; raises ApiError for a form that is unknown, and for two at once."""
    found = {name: each for name in _PLACES if (each := _READERS[name](values.get(name))) is not None}
    if len(found) > 1:
        first, second = list(found)[:2]
        raise bad_request(f"{first} and {second} exclude each other", second)
    return next((Constraint(*each) for each in found.items()), Constraint())


def field_of_grammar(error: InvalidRequestError | FailedPreconditionError) -> str:
    """The field on the wire that an error is about if it is a constraint's; else empty."""
    if isinstance(error, FailedPreconditionError):
        field = error.message.partition(": ")[0]
    else:
        field = error.field_violations[0].field if error.field_violations else ""
    return field if field.startswith(_ON_THE_WIRE) else ""


_AROUND_SCHEMA = re.compile(r".*?(failed to compile JSON schema: .*?)(?: \d+ \| .*)?")


@contextlib.contextmanager
def errors_of_constraint(name: str) -> Iterator[None]:
    """Errors of the scheduler about a constraint become those of the field that the caller gave; raises ApiError."""
    try:
        yield
    except (InvalidRequestError, FailedPreconditionError) as error:
        field = field_of_grammar(error)
        if not field:
            raise
        raise bad_request(f"{name}: {_of_schema(error.message.removeprefix(f'{field}: '))}", name) from None


def _of_schema(message: str) -> str:
    """What is wrong with a schema, without the grammar that the gateway made around it and its lines."""
    found = _AROUND_SCHEMA.fullmatch(message)
    return message if found is None else found[1]


def _structured_outputs(value: Any) -> dict[str, Any] | None:
    if value is None or not any(each is not None for each in value.values()):
        return None
    found = {name: each for name, each in value.items() if each is not None}
    if "start_after_token_ids" in found:
        found["start_after_token_ids"] = as_integers(found["start_after_token_ids"])
    return {"disable_additional_properties": True, **found} if "json" in found else found


def _response_format(value: Any) -> dict[str, Any] | None:
    """OpenAI's: text, json_object, json_schema; vLLM's structural_tag; llama.cpp's schema beside either JSON type.

    Text Generation Inference's `value` beside json_object, json or regex too, which huggingface_hub sends.
    """
    if value is None:
        return None
    where = "response_format"
    if value.get("value") is not None and value.get("type") in ("json_object", "json", "regex"):
        return _valued(value, where)
    if value.get("schema") is not None and value.get("type") in ("json_object", "json_schema"):
        return _flat({**value, "type": "json_schema"}, where, where)
    if value.get("type") != "json_schema":
        return _plain(value, where, where)
    check_keys(where, value, ("type", "json_schema"), where)
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        raise bad_request(f"{where}.json_schema must be an object with a schema", where)
    check_keys(f"{where}.json_schema", inner, _OF_SCHEMAS, where)
    return _json(inner, f"{where}.json_schema", where)


def _valued(value: dict[str, Any], where: str) -> dict[str, Any]:
    check_keys(where, value, ("type", "value"), where)
    if value["type"] != "regex":
        return _json({"schema": value["value"]}, where, where)
    if not isinstance(value["value"], str):
        raise bad_request(f"{where}.value must be a regular expression, not {shown(value['value'])}", where)
    return {"regex": value["value"]}


def _text(value: Any) -> dict[str, Any] | None:
    """That of responses: {"format": …}; OpenAI's usual verbosity beside it asks for nothing."""
    if value is None:
        return None
    given = {name: each for name, each in value.items() if (name, each) != ("verbosity", "medium")}
    check_keys("text", given, ("format",), "text")
    return None if value.get("format") is None else _flat(value["format"], "text.format", "text")


def _output_config(value: Any) -> dict[str, Any] | None:
    """Anthropic's: {"format": {"type": "json_schema", "schema": …}}; effort beside it is no constraint."""
    if value is None:
        return None
    check_keys("output_config", value, ("format", "effort"), "output_config")
    return None if value.get("format") is None else _flat(value["format"], "output_config.format", "output_config")


def _output_format(value: Any) -> dict[str, Any] | None:
    """The same, as it was called before."""
    return None if value is None else _flat(value, "output_format", "output_format")


def _flat(value: Any, where: str, param: str) -> dict[str, Any] | None:
    """A format whose schema stands beside its type."""
    if not isinstance(value, dict):
        raise bad_request(f"{where} must be an object, not {shown(value)}", param)
    if value.get("type") == "json_schema":
        check_keys(where, value, ("type", *_OF_SCHEMAS), param)
        return _json(value, where, param)
    return _plain(value, where, param)


def _plain(value: dict[str, Any], where: str, param: str) -> dict[str, Any] | None:
    kind = value.get("type")
    if kind == "structural_tag":  # its own keys are checked where it is compiled
        return {"structural_tag": value}
    if kind in ("text", "json_object"):
        check_keys(where, value, ("type",), param)
        return {"json_object": True} if kind == "json_object" else None
    raise bad_request(f"{where}.type must be text, json_object or json_schema, not {shown(kind)}", param)


def _json(value: dict[str, Any], where: str, param: str) -> dict[str, Any]:
    """A schema whose objects have the properties that it names, as all these APIs' servers read it."""
    schema = value.get("schema")
    if not isinstance(schema, (dict, bool)):
        raise bad_request(f"{where}.schema must be a JSON schema, not {shown(schema)}", param)
    return {"json": schema, "disable_additional_properties": True}


_READERS = {
    "structured_outputs": _structured_outputs,
    "response_format": _response_format,
    "text": _text,
    "output_config": _output_config,
    "output_format": _output_format,
}
