"""Requests as clients of the field send them (recorded by a proxy): each is served, and answered in its shape."""

from __future__ import annotations

import pytest

from tests.helpers.gateway.gateway import read_events

PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
USER = [{"role": "user", "content": "Hello"}]
BOTH = {"include_usage": True, "continuous_usage_stats": True}
REQUESTS = {
    "guidellm chat": (
        "/v1/chat/completions",
        {"messages": PARTS, "stream": True, "stream_options": BOTH, "max_completion_tokens": 3, "ignore_eos": True},
    ),
    "guidellm completions": (
        "/v1/completions",
        {"prompt": "Hello", "stream": True, "stream_options": BOTH, "max_tokens": 3, "ignore_eos": True},
    ),
    "langchain": ("/v1/chat/completions", {"messages": USER, "model": "toy", "max_completion_tokens": 3}),
    "vllm bench completions": (
        "/v1/completions",
        {
            "model": "toy", "prompt": [5, 6, 7], "repetition_penalty": 1.0, "max_tokens": 3, "logprobs": None,
            "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0,
        },
    ),
    "vllm bench chat": (
        "/v1/chat/completions",
        {
            "model": "toy", "messages": PARTS, "max_completion_tokens": 3, "stream": True, "top_k": -1, "min_p": 0.0,
            "stream_options": {"include_usage": True}, "repetition_penalty": 1.0,
        },
    ),
    "vllm bench responses": (
        "/v1/responses",
        {"model": "toy", "input": "Hello", "max_output_tokens": 3, "stream": True, "store": False},
    ),
    "aiperf responses": (
        "/v1/responses",
        {"model": "toy", "input": [{"role": "user", "content": "Hello", "type": "message"}], "max_output_tokens": 3},
    ),
    "aiperf messages": ("/v1/messages", {"model": "toy", "messages": USER, "max_tokens": 3, "stream": True}),
    "lm-eval": (
        "/v1/completions",
        {"model": "toy", "prompt": [[5, 6], [7, 8]], "max_tokens": 1, "logprobs": 1, "seed": 1234, "temperature": 0},
    ),
    "open webui": (
        "/v1/chat/completions",
        {
            "model": "toy", "messages": [{"role": "system", "content": "Be brief."}, *USER], "stream": True,
            "max_tokens": 3,
        },
    ),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
async def test_a_recorded_request_is_served(g, name):
    path, body = REQUESTS[name]
    headers = {"Accept": "text/event-stream", "X-Request-ID": "r-1", "anthropic-version": "2023-06-01"}
    async with g.http.post(path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        if not body.get("stream"):
            assert (await response.json())["usage"]
            return
        events = [event async for event in read_events(response)]
    if path.startswith("/v1/c"):
        assert events[-1] == "[DONE]"
        if "stream_options" in body:
            assert events[-2]["choices"] == []
            assert events[-2]["usage"]["completion_tokens"] == 3
    else:
        assert events[-1]["type"] in ("response.incomplete", "message_stop")
