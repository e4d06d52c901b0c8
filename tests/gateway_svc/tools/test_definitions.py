"""No key within tools and tool_choice is ignored in silence; what real clients send is taken."""

from __future__ import annotations

import pytest

from gateway_svc.http.errors import ApiError
from gateway_svc.requests.messages import messages_prompt
from gateway_svc.requests.tools import ToolUse, chat_tools, message_tools, response_tools

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CHAT = {"type": "function", "function": FUNCTION}
FLAT = {"type": "function", **FUNCTION}
CUSTOM = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("read", "tool"),
    [
        (chat_tools, CHAT | {"function": FUNCTION | {"strict": False}}),
        (chat_tools, CHAT | {"function": FUNCTION | {"strict": None, "description": None}}),
        (chat_tools, CHAT | {"cache_control": {"type": "ephemeral"}}),
        (chat_tools, {"function": FUNCTION}),
        (response_tools, FLAT | {"strict": True, "defer_loading": False}),
        (response_tools, {"type": "custom", "name": "f"}),
        (message_tools, CUSTOM | {"type": "custom", "cache_control": {"type": "ephemeral", "ttl": "5m"}}),
        (message_tools, CUSTOM | {"strict": True, "eager_input_streaming": True, "allowed_callers": ["direct"]}),
    ],
)
def test_what_clients_send_is_taken(read, tool):
    (found,) = read({"tools": [tool]}).tools
    assert found.name == "f"


@pytest.mark.parametrize(
    ("read", "tool", "said"),
    [
        (chat_tools, CHAT | {"name": "f"}, "tools[0].'name'"),
        (chat_tools, CHAT | {"function": FUNCTION | {"paramaters": {}}}, "did you mean"),
        (chat_tools, {"type": "custom", "custom": {"name": "f"}}, "custom"),
        (chat_tools, FLAT, "tools[0].'name'"),
        (response_tools, FLAT | {"input_schema": {}}, "tools[0].'input_schema'"),
        (response_tools, FLAT | {"defer_loading": True}, "defer_loading"),
        (response_tools, {"type": "web_search"}, "web_search"),
        (response_tools, {"type": "custom", "name": "f", "parameters": {}}, "tools[0].'parameters'"),
        (message_tools, CUSTOM | {"parameters": {}}, "tools[0].'parameters'"),
        (message_tools, CUSTOM | {"allowed_callers": ["code_execution_20250825"]}, "allowed_callers"),
        (message_tools, CUSTOM | {"input_examples": [{}]}, "input_examples"),
        (message_tools, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, "web_search_20250305"),
        (message_tools, {"type": "bash_20250124", "name": "bash"}, "bash_20250124"),
    ],
)
def test_other_keys_of_a_tool_are_refused_by_name(read, tool, said):
    with pytest.raises(ApiError) as refused:
        read({"tools": [tool]})
    assert (refused.value.status, refused.value.param) == (400, "tools")
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("read", "choice", "mode", "is_parallel"),
    [
        (chat_tools, NAMED, "required", False),
        (chat_tools, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}, "auto", True),
        (response_tools, {"type": "function", "name": "f"}, "required", False),
        (response_tools, {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
         "required", True),
        (message_tools, {"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        (message_tools, {"type": "any", "disable_parallel_tool_use": None}, "required", True),
        (message_tools, {"type": "tool", "name": "f"}, "required", False),
        (message_tools, {"type": "none"}, "none", True),
    ],
)  # fmt: skip
def test_choices(read, choice, mode, is_parallel):
    tool = {chat_tools: CHAT, response_tools: FLAT, message_tools: CUSTOM}[read]
    use = read({"tools": [tool], "tool_choice": choice})
    assert (use.mode, use.is_parallel) == (mode, is_parallel)


@pytest.mark.parametrize(
    ("read", "choice", "said"),
    [
        (chat_tools, NAMED | {"name": "f"}, "'name'"),
        (chat_tools, {"type": "function", "function": {"name": "f", "strict": True}}, "'strict'"),
        (chat_tools, {"type": "function", "name": "f"}, "'name'"),
        (chat_tools, {"type": "function"}, "function"),
        (chat_tools, {"type": "custom", "custom": {"name": "f"}}, "custom"),
        (chat_tools, {"type": "allowed_tools", "allowed_tools": {"tools": [NAMED], "modus": "auto"}}, "'modus'"),
        (chat_tools, {"type": "allowed_tools", "allowed_tools": {"tools": [NAMED]}, "mode": "auto"}, "'mode'"),
        (response_tools, {"type": "function", "name": "f", "function": {}}, "'function'"),
        (response_tools, {"type": "web_search_preview"}, "web_search_preview"),
        (response_tools, {"type": "allowed_tools", "tools": [{"type": "mcp", "server_label": "s"}]}, "mcp"),
        (message_tools, {"type": "auto", "disable_parallel_tool_use": "yes"}, "disable_parallel_tool_use"),
        (message_tools, {"type": "auto", "name": "f"}, "'name'"),
        (message_tools, {"type": "tool", "name": "f", "parallel": True}, "'parallel'"),
    ],
)
def test_other_keys_of_a_choice_are_refused_by_name(read, choice, said):
    tool = {chat_tools: CHAT, response_tools: FLAT, message_tools: CUSTOM}[read]
    with pytest.raises(ApiError) as refused:
        read({"tools": [tool], "tool_choice": choice})
    assert (refused.value.status, refused.value.param) == (400, "tool_choice")
    assert said in refused.value.message


def results(**more):
    content = [{"type": "tool_result", "tool_use_id": "t", "content": "no such city", **more}]
    prompt = messages_prompt({"messages": [{"role": "user", "content": content}]}, ToolUse())
    return [(message.role, message.content) for message in prompt.messages or ()]


def test_a_result_says_that_it_is_an_error():
    assert results() == results(is_error=False) == results(is_error=None) == [("tool", "no such city")]
    assert results(is_error=True) == [("tool", "Error: no such city")]
    assert results(is_error=True, content="error 5") == [("tool", "error 5")]
    assert results(is_error=True, content=[]) == [("tool", "Error: ")]
    with pytest.raises(ApiError, match="is_error"):
        results(is_error="yes")


def test_who_calls_a_tool_is_the_client():
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    for caller, is_refused in ((None, False), ({"type": "direct"}, False), ({"type": "code_execution"}, True)):
        values = {"messages": [{"role": "assistant", "content": [call | {"caller": caller}]}]}
        if is_refused:
            with pytest.raises(ApiError, match="caller"):
                messages_prompt(values, ToolUse())
        else:
            messages_prompt(values, ToolUse())
