"""Bodies of /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from gateway_svc.fields.constraints import output_constraint
from gateway_svc.fields.field import check_kind, wrong_value
from gateway_svc.fields.limits import MAX_METADATA, check_entries
from gateway_svc.fields.reading import read_fields
from gateway_svc.fields.sampling import answer_id, check_stream_options, require, sampling_params, unset_sampling
from gateway_svc.fields.tables import INPUT_TOKENS, RESPONSES
from gateway_svc.http.errors import bad_request
from gateway_svc.requests.request import PromptQuery, ResponsesRequest, TextFormat
from gateway_svc.requests.response_input import response_prompt
from gateway_svc.requests.tools import response_tools

_LOGPROBS = "message.output_text.logprobs"
_THOUGHTS = "reasoning.encrypted_content"
_RENAMED = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
_KEPT = {"disabled": None, "auto": -1}
"""truncate_prompt_tokens by truncation, as in vLLM."""


def read_response(body: Mapping[str, Any]) -> ResponsesRequest:
    """Read a request; raises ApiError."""
    values = read_fields(RESPONSES, body)
    require(values, "input")
    check_entries("metadata", values.get("metadata", {}), MAX_METADATA)
    check_stream_options(values)
    reasoning, include = values.get("reasoning", {}), values.get("include", [])
    _check_reasoning(reasoning)
    truncation = values.get("truncation", "disabled")
    if truncation not in _KEPT:
        raise wrong_value("truncation", "must be auto or disabled", truncation)
    use = response_tools(values)
    prompt = response_prompt(values, use)
    num_top = _num_top(include, values.get("top_logprobs"))
    max_tokens, constraint = values.get("max_output_tokens"), output_constraint(values)
    return ResponsesRequest(
        params=sampling_params(
            values,
            _RENAMED,
            constraint,
            max_tokens=max_tokens,
            logprobs=num_top,
            truncate_prompt_tokens=_KEPT[truncation],
        ),
        unset=unset_sampling(values, max_tokens),
        id=answer_id(values, "resp", uuid.uuid4().hex),
        model=values.get("model"),
        prompts=[prompt],
        constrained_by=constraint.field,
        use=use,
        is_streamed=values.get("stream", False),
        shows_thought=values.get("include_reasoning", True),
        splits_logprobs=num_top is not None,
        instructions=values.get("instructions"),
        max_output_tokens=max_tokens,
        metadata=values.get("metadata", {}),
        parallel_tool_calls=values.get("parallel_tool_calls", True),
        prompt_cache_key=values.get("prompt_cache_key"),
        reasoning=reasoning,
        truncation=truncation,
        text_format=_text_format(values.get("text", {}).get("format") or {"type": "text"}),
        user=values.get("user"),
        safety_identifier=values.get("safety_identifier"),
        carries_thought=_THOUGHTS in include,
    )


def read_input(body: Mapping[str, Any]) -> PromptQuery:
    """Read a request for the number of an input's tokens; raises ApiError."""
    values = read_fields(INPUT_TOKENS, body)
    require(values, "input")
    _check_reasoning(values.get("reasoning", {}))
    return PromptQuery(model=values.get("model"), prompt=response_prompt(values, response_tools(values)))


def _num_top(include: Sequence[str], number: int | None) -> int | None:
    """Top logprobs of each token, None for no logprobs; raises ApiError."""
    for index, name in enumerate(include):
        if name not in (_LOGPROBS, _THOUGHTS):
            message = f"only {_LOGPROBS} and {_THOUGHTS} are supported, not {name[:64]!a}"
            raise bad_request(f"include[{index}]: {message}", "include")
    if number is not None and number < 0:
        raise wrong_value("top_logprobs", "must be 0 or more", number)
    if _LOGPROBS not in include:
        if number:
            raise bad_request(f"top_logprobs needs {_LOGPROBS} in include", "top_logprobs")
        return None
    return number or 0


def _text_format(given: Mapping[str, Any]) -> TextFormat:
    """The format, of which `output_constraint` has read what constrains; raises ApiError."""
    kind = given["type"]
    if kind == "structural_tag":
        return TextFormat(kind=kind, tag={name: value for name, value in given.items() if name != "type"})
    for name, wanted in (("name", "a string"), ("description", "a string"), ("strict", "a boolean")):
        if (value := given.get(name)) is not None:
            check_kind(f"text.format.{name}", wanted, value, "text")
    return TextFormat(kind=kind, **{name: value for name, value in given.items() if name != "type"})


def _check_reasoning(reasoning: Mapping[str, Any]) -> None:
    for name, value in reasoning.items():
        if name not in ("effort", "summary", "generate_summary"):
            raise bad_request(f"reasoning.{name[:64]!a}: there is no such field", "reasoning")
        if value is not None and not (isinstance(value, str) and value.isalpha()):
            raise wrong_value("reasoning", f"must have a word as {name}", value)
