"""POST /tokenize and /detokenize, as vLLM has them, and their bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from cadenza.prompts import MAX_TOKEN_ID, Prompt
from gateway_svc.fields.field import read_fields
from gateway_svc.fields.sampling import require, utf8
from gateway_svc.fields.tables import DETOKENIZE, TOKENIZE
from gateway_svc.http.errors import bad_request
from gateway_svc.http.reading import read_body
from gateway_svc.models import check_model
from gateway_svc.requests.prompts import rendered_prompt
from gateway_svc.requests.request import PromptQuery, TokensQuery
from gateway_svc.requests.tools import chat_tools
from gateway_svc.state import STATE

_MAX_STRINGS = 1024
"""Tokens whose texts are asked for one by one."""
_OF_CHATS = ("tools", "chat_template", "chat_template_kwargs")


async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a text or a chat."""
    state = request.app[STATE]
    caller = await state.caller(request)
    asked = await read_body(request, read_tokenize)
    info = await check_model(state.names, asked.model, caller)
    ids = await caller.tokenize(asked.prompt, add_special_tokens=asked.add_special_tokens)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids, "token_strs": None}
    if asked.with_texts:
        if len(ids) > _MAX_STRINGS:
            raise bad_request(f"return_token_strs is for at most {_MAX_STRINGS} tokens", "return_token_strs")
        texts = {each: await caller.detokenize([each], skip_special_tokens=False) for each in set(ids)}
        answer["token_strs"] = [texts[each] for each in ids]
    return web.json_response(answer)


async def detokenize(request: web.Request) -> web.Response:
    """Text of token ids."""
    state = request.app[STATE]
    caller = await state.caller(request)
    asked = await read_body(request, read_detokenize)
    await check_model(state.names, asked.model, caller)
    return web.json_response({"prompt": await caller.detokenize(asked.token_ids, skip_special_tokens=False)})


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
    if any(not 0 <= each <= MAX_TOKEN_ID for each in ids):
        raise bad_request("tokens must hold token ids", "tokens")
    return TokensQuery(model=values.get("model"), token_ids=ids)
