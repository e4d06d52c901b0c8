"""Sampling parameters of a request: JSON in a tensor, or parameters of the request, with texts for numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from cadenza.sampling_params import SamplingParams
from cadenza_common.spelling import suggestion
from gateway_svc.dialects import inference_pb2 as pb
from gateway_svc.fields.constraints import output_constraint
from gateway_svc.fields.field import as_integers, shown
from gateway_svc.fields.sampling import check_number_of_choices, sampling_params, utf8
from gateway_svc.http.errors import bad_request

LORA_NAME = "lora_name"
_OWN = ("n", "logprobs", "max_tokens", "beam_width")
_KNOWN = [each.name for each in fields(SamplingParams)]
_SCALARS = {each.name: str(each.type).split(" ")[0] for each in fields(SamplingParams)}
_TRITON = "triton_"
"""Begins parameters of the protocol."""
_OF_PROTOCOL = frozenset({"timeout", "priority", "sequence_id", "sequence_start", "sequence_end"})
"""These are the protocol's too, from arguments of tritonclient's calls: its priority is that of Triton's queues, not
the sampling parameter."""
_MAX_PARAMETERS = 256


def of_tensor(text: bytes) -> dict[str, Any]:
    """The JSON object of `sampling_parameters`; raises ApiError."""
    return _object("sampling_parameters", text)


def of_request(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """The request's own parameters, which hold where there is no tensor; raises ApiError for more than there can be."""
    if len(parameters) > _MAX_PARAMETERS:
        raise bad_request(f"there are {len(parameters)} parameters, and can be {_MAX_PARAMETERS}")
    values = {}
    for name, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if kind is not None and not (name.startswith(_TRITON) or name in _OF_PROTOCOL):
            values[name] = getattr(value, kind)
    return values


def as_params(values: Mapping[str, Any]) -> tuple[SamplingParams, str]:
    """SamplingParams, and the LoRA adapter, empty: none. Raises ApiError for names and values that are unknown."""
    given = {name: _typed(name, value) for name, value in values.items() if value is not None}
    adapter = given.pop(LORA_NAME, "")
    if not isinstance(adapter, str):
        raise bad_request(f"{LORA_NAME} must be a string, not {shown(adapter)}")
    for name in given:
        if name not in _KNOWN:
            hint = suggestion(name[:64], [*_KNOWN, LORA_NAME])
            raise bad_request(f"sampling parameter {name[:64]!a}: there is no such one{hint}")
    structured = given.get("structured_outputs")
    if isinstance(structured, str):  # a request's parameters have no objects, and the backend takes no other form
        structured = given["structured_outputs"] = _object("structured_outputs", structured)
    if structured is not None and not isinstance(structured, dict):
        raise bad_request(f"structured_outputs must be an object, not {shown(structured)}")
    own = {name: given[name] for name in _OWN if name in given}
    params = sampling_params(given, constraint=output_constraint(given), **own)
    check_number_of_choices(params.n)
    return params, utf8(adapter, LORA_NAME)


def _object(name: str, text: bytes | str) -> dict[str, Any]:
    """A JSON object; raises ApiError that names the parameter."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{name} is no JSON: {error}"[:300]) from None
    if not isinstance(values, dict):
        raise bad_request(f"{name} must be a JSON object, not {shown(values)}")
    return values


def _typed(name: str, value: Any) -> Any:
    """A number or boolean that was sent as a text, as the backend's own sample client does; else the value itself."""
    kind = _SCALARS.get(name, "")
    if kind in ("int", "list[int]"):
        value = as_integers(value)
    if not isinstance(value, str) or kind not in ("int", "float", "bool"):
        return value
    if kind == "bool":
        known = {"true": True, "1": True, "false": False, "0": False}
        return known.get(value.strip().lower(), value)
    try:
        return int(value) if kind == "int" and "." not in value else as_integers(float(value))
    except ValueError:
        raise bad_request(f"{name} must be a number, not {shown(value)}") from None
