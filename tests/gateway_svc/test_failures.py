"""Requests that fail while they run: an error status before the first byte, an error event after it."""

from __future__ import annotations

import pytest

from cadenza.v1 import execution_pb2 as pb
from tests.helpers.scheduler.scheduler_world import script

USER = [{"role": "user", "content": "Hello"}]
BODIES = {
    "/v1/completions": {"prompt": "Hello", "seed": 1, "max_tokens": 50},
    "/v1/chat/completions": {"messages": USER, "seed": 1, "max_tokens": 50},
    "/v1/responses": {"input": "Hello", "seed": 1, "max_output_tokens": 50},
    "/v1/messages": {"messages": USER, "max_tokens": 50},
}
TEXT = "The quick brown fox"


def error_in(answer: dict) -> dict:
    """The error of an answer, or of the last event of a stream."""
    return answer["response"]["error"] if "response" in answer else answer["error"]


def text_of(event: dict | str) -> str:
    """The text that an event brings."""
    if event == "[DONE]":
        return ""
    choices = event.get("choices") or [event]
    return "".join(
        each.get("text") or (part if isinstance(part := each.get("delta", ""), str) else part.get("content", ""))
        for each in choices
    )


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_a_status(w, g, path, stream):
    w.executor.error_at_end = pb.SLOT_ERROR_NON_FINITE_LOGITS
    answer = await g.post(path, {**BODIES[path], "stream": stream}, 500)
    assert "logits were not finite" in answer["error"]["message"]
    await w.idle()


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in BODIES if "seed" in BODIES[path]])
async def test_a_failure_later_is_no_answer_either(w, g, path):
    script(w, TEXT, end=False)
    w.executor.error_at_end = pb.SLOT_ERROR_NON_FINITE_LOGITS
    answer = await g.post(path, BODIES[path], 500)
    assert "logits were not finite" in answer["error"]["message"]
    events = await g.events(path, BODIES[path])
    seen = "".join(map(text_of, events))
    assert seen
    assert TEXT.startswith(seen)
    last = events[-1] if path == "/v1/responses" else events[-2]
    assert "logits were not finite" in error_in(last)["message"]
    assert not any(choice["finish_reason"] for event in events[:-2] for choice in event.get("choices", ()))
    await w.idle()


async def test_what_the_request_itself_made_impossible_is_its_own_error(w, g):
    w.executor.error_at_end = pb.SLOT_ERROR_NO_ALLOWED_TOKEN
    error = (await g.post("/v1/completions", BODIES["/v1/completions"], 400))["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "no_allowed_token")
