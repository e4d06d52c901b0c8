"""One value for the four APIs: what is asked for in the words of any of them is the same request."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from cadenza.prompts import Prompt
from gateway_svc.http.errors import ApiError
from gateway_svc.openai.tokens import read_tokenize
from gateway_svc.requests.chat import read_chat
from gateway_svc.requests.completions import read_completion
from gateway_svc.requests.messages import read_count, read_messages
from gateway_svc.requests.request import GatewayRequest
from gateway_svc.requests.responses import read_response

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
SHARED = {"model": "m", "temperature": 0.5, "top_p": 0.9, "stream": True, "cache_salt": "s"}
CHAT = SHARED | {
    "messages": TURNS,
    "max_tokens": 9,
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    "chat_template_kwargs": {"enable_thinking": True},
    "reasoning_effort": "low",
}
RESPONSE = SHARED | {
    "instructions": "Be brief.",
    "input": "Hi",
    "max_output_tokens": 9,
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "text": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "chat_template_kwargs": {"enable_thinking": True},
    "reasoning": {"effort": "low"},
}
MESSAGE = SHARED | {
    "system": "Be brief.",
    "messages": TURNS[1:],
    "max_tokens": 9,
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
    "thinking": {"type": "enabled"},
}


def common(request: GatewayRequest) -> dict[str, object]:
    """What all APIs have, but for what differs by its name."""
    names = {each.name for each in fields(GatewayRequest)} - {"id", "constrained_by"}
    return {name: getattr(request, name) for name in names}


def thought(request: GatewayRequest) -> dict[str, Any]:
    """What the template is told of thoughts."""
    chat = request.prompts[0].chat
    assert chat is not None
    return json.loads(chat.chat_template_kwargs or "{}")


_NAMES = ("enable_thinking", "thinking", "reasoning")
OFF = dict.fromkeys(_NAMES, False) | {"thinking_mode": "disabled", "thinking_budget": 0}
ON = dict.fromkeys(_NAMES, True) | {"thinking_mode": "enabled"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "disabled"}, OFF),
        ({"type": "enabled", "budget_tokens": 2048}, ON | {"thinking_budget": 2048}),
        ({"type": "adaptive"}, ON | {"thinking_mode": "adaptive"}),
        (None, {}),
    ],
)
def test_whether_to_think_by_every_name_that_templates_read(given: object, expected: dict[str, Any]) -> None:
    body = {"messages": TURNS[1:], "max_tokens": 9} | ({} if given is None else {"thinking": given})
    assert thought(read_messages(body)) == expected
    body["chat_template_kwargs"] = {"thinking": "own"}
    assert thought(read_messages(body)) == expected | {"thinking": "own"}, "what is given counts"


@pytest.mark.parametrize(("effort", "expected"), [("none", OFF), ("high", ON), ("minimal", {})])
def test_an_effort_says_whether_to_think(effort: str, expected: dict[str, Any]) -> None:
    expected = {"reasoning_effort": effort, "thinking_effort": effort} | expected
    assert thought(read_chat({"messages": TURNS, "reasoning_effort": effort})) == expected
    assert thought(read_response({"input": "Hi", "reasoning": {"effort": effort}})) == expected
    body = {"messages": TURNS[1:], "max_tokens": 9, "output_config": {"effort": effort}}
    assert thought(read_messages(body)) == expected


@pytest.mark.parametrize("budget", [-1, "many", True, 1.5])
def test_a_budget_that_is_none(budget: object) -> None:
    body = {"messages": TURNS[1:], "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": budget}}
    with pytest.raises(ApiError, match=r"thinking.budget_tokens must be an integer of 0 or more") as caught:
        read_messages(body)
    assert caught.value.param == "thinking"


def test_one_request_in_the_words_of_three_apis():
    chat, response, message = read_chat(CHAT), read_response(RESPONSE), read_messages(MESSAGE)
    assert common(chat) == common(response) == common(message)
    assert [each.constrained_by for each in (chat, response, message)] == ["response_format", "text", "output_config"]
    assert (chat.params.max_tokens, chat.is_streamed, chat.use.mode) == (9, True, "required")


def test_a_completion_is_the_same_value_with_more_prompts():
    request = read_completion({"prompt": ["a", "b"], "echo": True, "max_tokens": 0, "logprobs": 2, "stream": True})
    assert type(request) is GatewayRequest
    assert request.prompts == [Prompt(text="a"), Prompt(text="b")]
    assert (request.echoes, request.is_prompt_alone, request.num_top) == (True, True, 2)
    assert (request.params.max_tokens, request.params.prompt_logprobs) == (1, 2)
    assert not request.shows_prompt_logprobs, "they were not asked for"


def test_a_prompt_is_counted_as_it_would_be_run():
    asked = {name: CHAT[name] for name in ("model", "messages", "tools")} | {"chat_template_kwargs": ON}
    (run,) = read_chat(asked).prompts
    assert read_tokenize(asked).prompt == run
    counted = {name: MESSAGE[name] for name in ("model", "system", "messages", "tools", "thinking")}
    assert read_count(counted).prompt == run


@pytest.mark.parametrize(
    ("read", "body", "param"),
    [
        (read_chat, CHAT | {"n": 65, "request_id": ""}, "n"),
        (read_chat, CHAT | {"top_logprobs": 1, "stream_options": {"a": 1}}, "top_logprobs"),
        (read_completion, {"prompt": [], "n": 0}, "prompt"),
        (read_response, RESPONSE | {"reasoning": {"efort": "low"}, "tools": [{}]}, "reasoning"),
        (read_messages, {"messages": [], "tools": [{}]}, "max_tokens"),
    ],
)
def test_of_several_faults_the_first_is_told(read, body, param):
    with pytest.raises(ApiError) as refused:
        read(body)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("given", "repeated"),
    [
        (None, {"type": "text"}),
        ({}, {"type": "text"}),
        ({"format": None}, {"type": "text"}),
        ({"format": {"type": "json_object"}}, {"type": "json_object"}),
        (
            {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}},
            {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True},
        ),
        (
            {"format": {"type": "structural_tag", "structures": [], "triggers": ["a"]}},
            {"type": "structural_tag", "structures": [], "triggers": ["a"]},
        ),
    ],
)
def test_a_responses_format_is_repeated_as_it_was_given(given, repeated):
    request = read_response({"input": "a", "text": given})
    assert request.text_format.as_object() == repeated
