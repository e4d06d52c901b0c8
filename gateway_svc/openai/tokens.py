"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway_svc.http.errors import bad_request
from gateway_svc.models import check_model
from gateway_svc.requests.tokens import read_detokenize, read_tokenize
from gateway_svc.state import STATE

_MAX_STRINGS = 1024
"""Tokens whose texts are asked for one by one."""


async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a text or a chat."""
    asked, state, caller = await request.app[STATE].asked(request, read_tokenize, generates=False)
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
    asked, state, caller = await request.app[STATE].asked(request, read_detokenize, generates=False)
    await check_model(state.names, asked.model, caller)
    return web.json_response({"prompt": await caller.detokenize(asked.token_ids, skip_special_tokens=False)})
