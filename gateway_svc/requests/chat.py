"""Bodies of /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from gateway_svc.fields.constraints import output_constraint
from gateway_svc.fields.field import wrong_value
from gateway_svc.fields.reading import read_fields
from gateway_svc.fields.sampling import (
    answer_id,
    number_of_choices,
    require,
    sampling_params,
    stream_options,
    unset_sampling,
)
from gateway_svc.fields.tables import CHAT
from gateway_svc.http.errors import bad_request
from gateway_svc.requests.prompts import rendered_prompt
from gateway_svc.requests.request import GatewayRequest
from gateway_svc.requests.tools import chat_tools


def read_chat(body: Mapping[str, Any]) -> GatewayRequest:
    """Read a request; raises ApiError."""
    values = read_fields(CHAT, body)
    use = chat_tools(values)
    prompt = rendered_prompt(require(values, "messages"), values, use)
    num_top = _num_top(values.get("logprobs"), values.get("top_logprobs"))
    with_usage, with_running_usage = stream_options(values)
    limits = [(name, values[name]) for name in ("max_completion_tokens", "max_tokens") if name in values]
    if len({limit for _, limit in limits}) == 2:
        raise bad_request("max_tokens and max_completion_tokens are one thing, and differ", "max_tokens")
    named, max_tokens = limits[0] if limits else ("max_tokens", None)
    is_streamed, prompt_logprobs = values.get("stream", False), values.get("prompt_logprobs")
    if is_streamed and prompt_logprobs is not None:
        raise bad_request("prompt_logprobs is not for stream=true", "prompt_logprobs")
    n, constraint = number_of_choices(values), output_constraint(values)
    renamed = {"logprobs": "top_logprobs", "max_tokens": named}
    return GatewayRequest(
        params=sampling_params(values, renamed, constraint, n=n, max_tokens=max_tokens, logprobs=num_top),
        unset=unset_sampling(values, max_tokens),
        id=answer_id(values, "chatcmpl", uuid.uuid4().hex),
        model=values.get("model"),
        prompts=[prompt],
        constrained_by=constraint.field,
        use=use,
        is_streamed=is_streamed,
        with_usage=with_usage,
        with_running_usage=with_running_usage,
        echoes=values.get("echo", False),
        shows_thought=values.get("include_reasoning", True),
        shows_prompt_logprobs=prompt_logprobs is not None,
        shows_token_ids=values.get("return_token_ids", False),
        names_tokens_by_id=values.get("return_tokens_as_token_ids", False),
    )


def _num_top(with_logprobs: bool | None, number: int | None) -> int | None:
    """Top logprobs of each token, None for no logprobs; raises ApiError."""
    if not with_logprobs:
        if number:
            raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
        return None
    if number is not None and number < 0:
        raise wrong_value("top_logprobs", "must be 0 or more", number)
    return number or 0
