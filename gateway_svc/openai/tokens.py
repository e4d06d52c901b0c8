"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from cadenza.prompts import Prompt
from gateway_svc.fields.field import read_fields
from gateway_svc.fields.sampling import require, utf8
from gateway_svc.fields.tables import DETOKENIZE, TOKENIZE
from gateway_svc.http.errors import bad_request
from gateway_svc.http.reading import off_loop, read_object
from gateway_svc.models import check_model
from gateway_svc.openai.prompts import chat_prompt
from gateway_svc.state import STATE
from gateway_svc.tools.definitions import chat_tools

_MAX_STRINGS = 1024
"""Tokens whose texts are asked for one by one."""
_OF_CHATS = ("tools", "chat_template", "chat_template_kwargs")
_MAX_TOKEN_ID = 2**32 - 1


async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a text or a chat."""
    state = request.app[STATE]
    caller = await state.caller(request)
    values = await off_loop(request, read_fields, TOKENIZE, await read_object(request))
    if ("prompt" in values) == ("messages" in values):
        raise bad_request("give either prompt or messages", "prompt")
    if "prompt" in values:
        for name in _OF_CHATS:
            if values.get(name):
                raise bad_request(f"{name} needs messages", name)
        prompt = Prompt(text=utf8(values["prompt"], "prompt"))
    else:
        use = await off_loop(request, chat_tools, values)
        prompt = await off_loop(request, chat_prompt, values["messages"], values, use)
    info = await check_model(state.names, values.get("model"), caller)
    ids = await caller.tokenize(prompt, add_special_tokens=values.get("add_special_tokens", True))
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids, "token_strs": None}
    if values.get("return_token_strs"):
        if len(ids) > _MAX_STRINGS:
            raise bad_request(f"return_token_strs is for at most {_MAX_STRINGS} tokens", "return_token_strs")
        texts = {each: await caller.detokenize([each], skip_special_tokens=False) for each in set(ids)}
        answer["token_strs"] = [texts[each] for each in ids]
    return web.json_response(answer)


async def detokenize(request: web.Request) -> web.Response:
    """Text of token ids."""
    state = request.app[STATE]
    caller = await state.caller(request)
    values = await off_loop(request, read_fields, DETOKENIZE, await read_object(request))
    ids = require(values, "tokens")
    if any(not 0 <= each <= _MAX_TOKEN_ID for each in ids):
        raise bad_request("tokens must hold token ids", "tokens")
    await check_model(state.names, values.get("model"), caller)
    return web.json_response({"prompt": await caller.detokenize(ids, skip_special_tokens=False)})
