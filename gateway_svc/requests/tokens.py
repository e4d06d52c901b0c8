"""Bodies of /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cadenza.prompts import MAX_TOKEN_ID, Prompt
from gateway_svc.fields.limits import MAX_PROMPT_TOKENS, check_entries
from gateway_svc.fields.reading import read_fields
from gateway_svc.fields.sampling import require, utf8
from gateway_svc.fields.tables import DETOKENIZE, TOKENIZE
from gateway_svc.http.errors import bad_request
from gateway_svc.requests.prompts import rendered_prompt
from gateway_svc.requests.request import PromptQuery, TokensQuery
from gateway_svc.requests.tools import chat_tools

_OF_CHATS = ("tools", "chat_template", "chat_template_kwargs")


def read_tokenize(body: Mapping[str, Any]) -> PromptQuery:
    """Read a request for the tokens of a text or a chat; raises ApiError."""
    values = read_fields(TOKENIZE, body)
    if ("prompt" in values) == ("messages" in values):
        raise bad_request("give either prompt or messages", "prompt")
    if "prompt" in values:
        for name in _OF_CHATS:
            if values.get(name):
                raise bad_request(f"{name} needs messages", name)
        prompt = Prompt(text=utf8(values["prompt"], "prompt"))
    else:
        prompt = rendered_prompt(values["messages"], values, chat_tools(values))
    return PromptQuery(
        model=values.get("model"),
        prompt=prompt,
        add_special_tokens=values.get("add_special_tokens", True),
        with_texts=values.get("return_token_strs", False),
    )


def read_detokenize(body: Mapping[str, Any]) -> TokensQuery:
    """Read a request for the text of token ids; raises ApiError."""
    values = read_fields(DETOKENIZE, body)
    ids = require(values, "tokens")
    check_entries("tokens", ids, MAX_PROMPT_TOKENS)
    if any(not 0 <= each <= MAX_TOKEN_ID for each in ids):
        raise bad_request("tokens must hold token ids", "tokens")
    return TokensQuery(model=values.get("model"), token_ids=ids)
