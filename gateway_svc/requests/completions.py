"""Bodies of /v1/completions."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from cadenza.prompts import Prompt, parse_prompts
from cadenza_common.wire.transport import MAX_REQUEST_BYTES
from gateway_svc.fields.constraints import output_constraint
from gateway_svc.fields.field import as_integers, wrong_value
from gateway_svc.fields.limits import MAX_PROMPT_TOKENS
from gateway_svc.fields.reading import read_fields
from gateway_svc.fields.sampling import (
    answer_id,
    number_of_choices,
    require,
    sampling_params,
    stream_options,
    unset_sampling,
)
from gateway_svc.fields.tables import COMPLETIONS
from gateway_svc.http.errors import ApiError, bad_request
from gateway_svc.requests.prompts import with_salt
from gateway_svc.requests.request import GatewayRequest

MAX_PROMPTS = 1024
"""Prompts of one request."""
_DEFAULT_MAX_TOKENS = 16


def read_completion(body: Mapping[str, Any]) -> GatewayRequest:
    """Read a request; raises ApiError."""
    values = read_fields(COMPLETIONS, body)
    prompts = _prompts(require(values, "prompt"), values.get("cache_salt"))
    with_usage, with_running_usage = stream_options(values)
    n, is_streamed, echoes = number_of_choices(values), values.get("stream", False), values.get("echo", False)
    best_of, prompt_logprobs = values.get("best_of"), values.get("prompt_logprobs")
    if is_streamed and best_of is not None and best_of > n:
        raise wrong_value("best_of", f"must be n={n} with stream: the best are known at the end", best_of)
    if is_streamed and prompt_logprobs is not None:
        raise bad_request("prompt_logprobs is not for stream=true", "prompt_logprobs")
    max_tokens, num_top = values.get("max_tokens", _DEFAULT_MAX_TOKENS), values.get("logprobs")
    is_prompt_alone = echoes and max_tokens == 0
    own: dict[str, Any] = {"n": n, "max_tokens": 1 if is_prompt_alone else max_tokens, "logprobs": num_top}
    if num_top is not None and echoes:
        own["prompt_logprobs"] = max(num_top, prompt_logprobs or 0)
    constraint = output_constraint(values)
    return GatewayRequest(
        params=sampling_params(values, constraint=constraint, **own),
        unset=unset_sampling(values, max_tokens),
        id=answer_id(values, "cmpl", uuid.uuid4().hex),
        model=values.get("model"),
        prompts=prompts,
        constrained_by=constraint.field,
        is_streamed=is_streamed,
        with_usage=with_usage,
        with_running_usage=with_running_usage,
        add_special_tokens=values.get("add_special_tokens", True),
        echoes=echoes,
        is_prompt_alone=is_prompt_alone,
        shows_prompt_logprobs=prompt_logprobs is not None,
        shows_token_ids=values.get("return_token_ids", False),
        names_tokens_by_id=values.get("return_tokens_as_token_ids", False),
    )


def _too_many(num_ids: int) -> ApiError:
    """The error of token ids that no model here takes: most of those that no message can hold either are told so."""
    if 2 * num_ids > MAX_REQUEST_BYTES:
        return ApiError(413, f"the prompt has {num_ids} token ids, and can have {MAX_REQUEST_BYTES} bytes at most")
    return bad_request(f"prompt: a prompt has over {MAX_PROMPT_TOKENS} token ids", "prompt")


def _prompts(value: Any, cache_salt: str | None) -> list[Prompt]:
    """The prompts of a completion: a text, texts, token ids, or lists of token ids. Raises ApiError."""
    value = as_integers(value)
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise bad_request(f"prompt has {len(value)} prompts; at most {MAX_PROMPTS} are allowed", "prompt")
    for each in (value, *value) if isinstance(value, list) else ():
        if isinstance(each, list) and len(each) > MAX_PROMPT_TOKENS:
            raise _too_many(len(each))
    if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        raise bad_request("prompt must hold texts, or lists of token ids", "prompt")
    try:
        prompts = parse_prompts(value)
    except ValueError as error:
        raise bad_request(f"prompt: {error}"[:500], "prompt") from None
    return [with_salt(each, cache_salt) for each in prompts]
