"""Bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from gateway_svc.fields.constraints import output_constraint
from gateway_svc.fields.field import read_fields
from gateway_svc.fields.sampling import require, sampling_params
from gateway_svc.fields.tables import COUNT_TOKENS, MESSAGES
from gateway_svc.requests.message_blocks import messages_prompt, thinking
from gateway_svc.requests.request import GatewayRequest, PromptQuery
from gateway_svc.requests.tools import message_tools

_RENAMED = {"stop": "stop_sequences"}


def read_messages(body: Mapping[str, Any]) -> GatewayRequest:
    """Read a request; raises ApiError."""
    values = read_fields(MESSAGES, body)
    require(values, "messages")
    max_tokens, stop = require(values, "max_tokens"), values.get("stop_sequences", [])
    use = message_tools(values)
    prompt = messages_prompt(values, use)
    constraint = output_constraint(values)
    return GatewayRequest(
        id=f"msg_{uuid.uuid4().hex}",
        model=values.get("model"),
        prompts=[prompt],
        params=sampling_params(values, _RENAMED, constraint, max_tokens=max_tokens, stop=stop),
        constrained_by=constraint.field,
        use=use,
        is_streamed=values.get("stream", False),
        shows_thought=bool(thinking(values)),
    )


def read_count(body: Mapping[str, Any]) -> PromptQuery:
    """Read a request for the number of a conversation's tokens; raises ApiError."""
    values = read_fields(COUNT_TOKENS, body)
    require(values, "messages")
    prompt = messages_prompt(values, message_tools(values))
    return PromptQuery(model=values.get("model"), prompt=prompt)
