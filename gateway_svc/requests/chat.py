"""Bodies of /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from cadenza.prompts import Prompt
from gateway_svc.fields.constraints import output_constraint
from gateway_svc.fields.field import read_fields, wrong_value
from gateway_svc.fields.sampling import answer_id, number_of_choices, require, sampling_params, stream_options
from gateway_svc.fields.tables import CHAT
from gateway_svc.http.errors import bad_request
from gateway_svc.requests.prompts import chat_prompt, template_arguments
from gateway_svc.requests.request import GatewayRequest
from gateway_svc.requests.tools import ToolUse, chat_tools


def read_chat(body: Mapping[str, Any]) -> GatewayRequest:
    """Read a request; raises ApiError."""
    values = read_fields(CHAT, body)
    use = chat_tools(values)
    prompt = prompt_of_chat(require(values, "messages"), values, use)
    num_top = _num_top(values.get("logprobs"), values.get("top_logprobs"))
    with_usage, with_running_usage = stream_options(values)
    named, max_tokens = _max_tokens(values)
    is_streamed, prompt_logprobs = values.get("stream", False), values.get("prompt_logprobs")
    if is_streamed and prompt_logprobs is not None:
        raise bad_request("prompt_logprobs is not for stream=true", "prompt_logprobs")
    n, constraint = number_of_choices(values), output_constraint(values)
    renamed = {"logprobs": "top_logprobs", "max_tokens": named}
    return GatewayRequest(
        params=sampling_params(values, renamed, constraint, n=n, max_tokens=max_tokens, logprobs=num_top),
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


def prompt_of_chat(messages: Any, values: Mapping[str, Any], use: ToolUse) -> Prompt:
    """The prompt of messages, with the fields beside them that say how they are rendered; raises ApiError."""
    return chat_prompt(
        messages,
        use,
        continues=values.get("continue_final_message", False),
        begins_turn=values.get("add_generation_prompt"),
        documents=values.get("documents"),
        template=values.get("chat_template"),
        arguments=template_arguments(values.get("chat_template_kwargs", {}), values.get("reasoning_effort")),
        cache_salt=values.get("cache_salt"),
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


def _max_tokens(values: Mapping[str, Any]) -> tuple[str, int | None]:
    """max_tokens and the name that it has; raises ApiError for two that differ."""
    given = [name for name in ("max_completion_tokens", "max_tokens") if name in values]
    if len(given) == 2 and values[given[0]] != values[given[1]]:
        raise bad_request("max_tokens and max_completion_tokens are one thing, and differ", "max_tokens")
    return (given[0], values[given[0]]) if given else ("max_tokens", None)
