"""Sampling parameters of the engine protocol."""

from __future__ import annotations

from typing import Any, Literal

from cadenza.sampling_params import SamplingParams
from gateway_svc.dialects import vllm_engine_pb2 as pb
from gateway_svc.fields.sampling import check_constraint, check_lists, check_number_of_choices
from gateway_svc.http.errors import bad_request

_PLAIN = ("frequency_penalty", "presence_penalty", "min_p", "top_k", "min_tokens", "ignore_eos", "skip_special_tokens")
_FLAGS = ("include_stop_str_in_output",)
_OPTIONAL: tuple[Literal["temperature", "logprobs", "prompt_logprobs", "seed", "truncate_prompt_tokens"], ...] = (
    "temperature",
    "logprobs",
    "prompt_logprobs",
    "seed",
    "truncate_prompt_tokens",
)
_LISTS = ("stop", "stop_token_ids")
_POSITIVE = ("top_p", "repetition_penalty", "n")
"""0 is no value of theirs, and so as absent."""


def sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """The parameters; texts are made only where stop strings are looked for. Raises ApiError."""
    values: dict[str, Any] = {name: getattr(message, name) for name in (*_PLAIN, *_FLAGS)}
    values |= {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    values |= {name: getattr(message, name) for name in _POSITIVE if getattr(message, name)}
    values |= {name: list(getattr(message, name)) for name in _LISTS}
    values["max_tokens"] = message.max_tokens if message.HasField("max_tokens") else None
    values["detokenize"] = bool(message.stop)
    if values.get("seed", 0) < 0:
        values["seed"] %= 2**64  # a seed of 64 bits is any number; -1 here is a number too
    if message.logit_bias:
        values["logit_bias"] = dict(message.logit_bias)
    constraint = message.WhichOneof("constraint")
    if constraint is not None:
        values["structured_outputs"] = _constraint(message, constraint)
    check_lists(values, {name: f"sampling_params.{name}" for name in values})
    try:
        params = SamplingParams(**values)
    except ValueError as error:
        raise bad_request(f"sampling_params.{error}"[:500]) from None
    check_number_of_choices(params.n, "sampling_params.n")
    check_constraint(params, "sampling_params.structured_outputs")
    return params


def read_params(raw: bytes) -> SamplingParams:
    """The same of the message as it is on the wire."""
    return sampling_params(pb.SamplingParams.FromString(raw))


def _constraint(message: pb.SamplingParams, name: str) -> dict[str, Any]:
    if name == "choice":
        return {"choice": list(message.choice.choices)}
    return {"json" if name == "json_schema" else name: getattr(message, name)}
