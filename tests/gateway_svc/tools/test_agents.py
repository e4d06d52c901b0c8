"""What agents send that no SDK sends by itself: Claude Code on /v1/messages, Codex on /v1/responses.

The shapes are those that others have recorded: https://github.com/vllm-project/vllm/issues/44000,
https://github.com/vllm-project/vllm/pull/36829 and codex-rs/codex-api/src/common.rs of https://github.com/openai/codex.
"""

from __future__ import annotations

import json

import pytest

from gateway_svc.http.errors import ApiError
from gateway_svc.requests.messages import messages_prompt
from gateway_svc.requests.response_input import brought_back, carried, response_prompt
from gateway_svc.requests.response_tools import input_of
from gateway_svc.requests.tools import ToolUse, response_tools
from tests.helpers.models.tool_models import call_text

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]}
KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


def claude_code(mark):
    """A request of Claude Code's; mark: what it makes anew for each."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.200; cc_entrypoint=cli; cch={mark};"
    system = [billing, "You are an agent.", "Be brief, and use the tools that you are given."]
    return {
        "model": "toy",
        "max_tokens": 8,
        "stream": True,
        "metadata": {"user_id": "user_1_account__session_2"},
        "system": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in system],
        "messages": [
            USER,
            {"role": "ctx", "content": "A note."},
            {"role": "msg", "content": [{"type": "text", "text": "Go on"}]},
        ],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": KEEP_ALL,
        "temperature": 1,
        "tools": [
            {
                "name": "Bash",
                "description": "Runs.",
                "input_schema": {"$schema": "x", "type": "object", "properties": {}},
            }
        ],
    }


async def test_what_claude_code_sends_is_answered(hermes):
    events = await hermes.events(f"{MESSAGES}?beta=true", claude_code("fa690"), anthropic_version="2023-06-01")
    assert events[-1]["type"] == "message_stop"
    no_prompt = ("max_tokens", "stream", "metadata", "temperature")
    asked = {name: value for name, value in claude_code("eb6c6").items() if name not in no_prompt}
    counted = await hermes.post(f"{MESSAGES}/count_tokens?beta=true", asked)
    assert counted == {"input_tokens": events[-2]["usage"]["input_tokens"]}


def test_a_mark_that_changes_leaves_the_prompt_as_it_is():
    assert messages_prompt(claude_code("fa690"), ToolUse()) == messages_prompt(claude_code("eb6c6"), ToolUse())
    for system in ("x-anthropic-billing-header: a\nBe brief.", "Be brief.", [{"type": "text", "text": "Be brief."}]):
        prompt = messages_prompt({"system": system, "messages": [USER]}, ToolUse())
        assert prompt.messages[0].content == "Be brief."
    (only,) = messages_prompt({"system": "x-anthropic-billing-header: a", "messages": [USER]}, ToolUse()).messages
    assert only.role == "user"


def test_effort_is_an_argument_of_the_template():
    prompt = messages_prompt(claude_code("0"), ToolUse())
    arguments = json.loads(prompt.chat.chat_template_kwargs)
    assert arguments.items() >= {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}.items()
    system, user = prompt.messages
    assert (system.role, user.role) == ("system", "user")
    assert system.content == "You are an agent.Be brief, and use the tools that you are given."
    assert user.content == "Hello\n\nA note.\n\nGo on", "templates refuse turns that do not alternate"


def test_a_thought_that_nobody_can_read_is_left_out():
    blocks = [{"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": "Well.", "signature": "s"}]
    messages = [USER, {"role": "assistant", "content": [*blocks, {"type": "text", "text": "Yes"}]}, USER]
    turn = messages_prompt({"messages": messages}, ToolUse()).messages[1]
    assert (turn.content, turn.reasoning_content) == ("Yes", "Well.")


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    "management",
    [
        {"edits": [{"type": "clear_tool_uses_20250919"}]},
        {"edits": [{"type": "clear_thinking_20251015"}]},
        {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}]},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all", "trigger": {}}]},
        {"edits": "all"},
        {"edits": ["all"]},
        {"edit": []},
    ],
)
async def test_edits_of_the_messages_are_refused_by_name(hermes, management):
    body = {**claude_code("0"), "context_management": management}
    error = (await hermes.post(MESSAGES, body, 400))["error"]
    assert "context_management" in error["message"]
    for nothing in ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]}):
        await hermes.post(MESSAGES, {**body, "stream": False, "context_management": nothing})


def codex(items):
    """A request of Codex's."""
    return {
        "model": "toy",
        "instructions": "You are an agent.",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}, *items],
        "tools": [
            {"type": "function", "name": "shell", "description": "", "strict": False, "parameters": {"type": "object"}}
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread",
        "client_metadata": {"x-codex-installation-id": "id"},
        "seed": 1,
    }


async def test_a_thought_comes_back_by_its_encrypted_content_alone(hermes):
    hermes.script("<think>Well, é.</think>Yes")
    answer = await hermes.post(RESPONSES, codex([]))
    thought, message = answer["output"]
    events = await hermes.events(RESPONSES, codex([]))
    streamed = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [streamed[0]["content"], streamed[0]["encrypted_content"]] == [
        thought["content"],
        thought["encrypted_content"],
    ]
    assert streamed[0] == events[-1]["response"]["output"][0]
    without = await hermes.post(RESPONSES, {**codex([]), "include": []})
    assert "encrypted_content" not in without["output"][0]
    sent = {name: thought[name] for name in ("type", "id", "summary", "encrypted_content")}
    await hermes.post(RESPONSES, codex([sent, message]))
    for item in (sent, thought, {"type": "reasoning", "summary": [], "content": thought["content"]}):
        turn = response_prompt(codex([item, message]), ToolUse()).messages[-1]
        assert (turn.role, turn.reasoning_content, turn.content) == ("assistant", "Well, é.", "Yes")


@pytest.mark.slow
@pytest.mark.parametrize("given", ["gAAAA", "cadenza:%", "cadenza:/w==", "cadenza:é", 5])
async def test_a_thought_of_another_server_is_refused_by_name(hermes, given):
    item = {"type": "reasoning", "summary": [], "encrypted_content": given}
    error = (await hermes.post(RESPONSES, codex([item]), 400))["error"]
    assert error["param"] == "input"
    assert "input[1].encrypted_content" in error["message"]


@pytest.mark.parametrize("thought", ["", "a", "é\n\x00天"])
def test_what_is_carried_is_brought_back(thought):
    assert brought_back(carried(thought)) == thought


TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
ANSWER = f"<think>Well.</think>I look. {call_text('f', {'a': 1})}"


async def test_an_answer_is_sent_back_as_it_is_by_a_chat(hermes):
    hermes.script(ANSWER)
    body = {"messages": [USER], "tools": [{"type": "function", "function": TOOL}]}
    message = (await hermes.post("/v1/chat/completions", body))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "1"}
    again = await hermes.post("/v1/chat/completions", {**body, "messages": [USER, message, result]})
    assert again["choices"][0]["message"]["reasoning"] == "Well."


async def test_an_answer_is_sent_back_as_it_is_by_a_response(hermes):
    hermes.script(ANSWER)
    body = {"input": [{"role": "user", "content": "Hello"}], "tools": [{"type": "function", **TOOL}]}
    output = (await hermes.post(RESPONSES, body))["output"]
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "1"}
    again = await hermes.post(RESPONSES, {**body, "input": [*body["input"], *output, result]})
    assert [item["type"] for item in again["output"]] == ["reasoning", "message", "function_call"]


async def test_an_answer_is_sent_back_as_it_is_by_a_message(hermes):
    hermes.script(ANSWER)
    tool = {"name": "f", "input_schema": TOOL["parameters"]}
    body = {"model": "toy", "max_tokens": 200, "messages": [USER], "tools": [tool], "thinking": {"type": "adaptive"}}
    content = (await hermes.post(MESSAGES, body))["content"]
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "1"}
    turns = [USER, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    again = await hermes.post(MESSAGES, {**body, "messages": turns})
    assert [block["type"] for block in again["content"]] == ["thinking", "text", "tool_use"]


PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"},
}
GROUP = {
    "type": "namespace",
    "name": "mcp__idea",
    "description": "Tools of the editor.",
    "tools": [
        {"type": "function", "name": "open", "description": "Opens.", "parameters": {"type": "object"}},
        {"type": "custom", "name": "say"},
    ],
}


async def both(hermes, body):
    """The items of an answer, which are the same in a stream, and the types of its events of calls."""
    whole = await hermes.post(RESPONSES, body)
    events = await hermes.events(RESPONSES, {**body, "stream": True})
    streamed = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    ids = ("id", "call_id")
    found = [
        [{k: v for k, v in item.items() if k not in ids} for item in items] for items in (whole["output"], streamed)
    ]
    assert found[0] == found[1]
    return whole, [event for event in events if "_call_" in event["type"]]


async def test_a_custom_tool_is_called_with_a_text(hermes):
    """Codex edits files so, and ends a turn whose call is that of a function."""
    text = '*** Begin Patch\n+é "x" \\\n*** End Patch'
    hermes.script(call_text("apply_patch", {"input": text}))
    body = {**codex([]), "tools": [PATCH]}
    answer, events = await both(hermes, body)
    (call,) = answer["output"]
    assert (call["type"], call["name"], call["input"], call["status"]) == (
        "custom_tool_call",
        "apply_patch",
        text,
        "completed",
    )
    assert call["id"].startswith("ctc_")
    assert [event["type"] for event in events] == [
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
    ]
    assert (events[0]["delta"], events[1]["input"]) == (text, text)
    assert answer["tools"] == [PATCH]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done"}
    await hermes.post(RESPONSES, {**codex([call, result]), "tools": [PATCH]})
    turns = response_prompt(codex([call, result]), ToolUse()).messages[2:]
    assert json.loads(turns[0].tool_calls[0].arguments) == {"input": text}
    assert (turns[1].role, turns[1].content) == ("tool", "Done")


async def test_tools_of_a_namespace_are_called_by_both_names(hermes):
    hermes.script(call_text("mcp__idea__open", {"a": 1}) + call_text("mcp__idea__say", {"input": "Hi"}))
    body = {**codex([]), "tools": [PATCH, GROUP], "parallel_tool_calls": True}
    answer, _ = await both(hermes, body)
    calls = [(each["type"], each["namespace"], each["name"]) for each in answer["output"]]
    assert calls == [("function_call", "mcp__idea", "open"), ("custom_tool_call", "mcp__idea", "say")]
    assert [each["name"] for each in answer["tools"][1]["tools"]] == ["open", "say"]
    await hermes.post(RESPONSES, {**body, **codex(answer["output"]), "tools": body["tools"]})
    turn = response_prompt(codex(answer["output"]), ToolUse()).messages[2]
    assert [each.name for each in turn.tool_calls] == ["mcp__idea__open", "mcp__idea__say"]


def test_what_the_model_sees_of_them():
    rendered = response_tools({"tools": [PATCH, GROUP, {**GROUP, "name": "b__"}]}).rendered()
    functions = [each["function"] for each in rendered]
    assert [each["name"] for each in functions] == [
        "apply_patch",
        "mcp__idea__open",
        "mcp__idea__say",
        "b__open",
        "b__say",
    ]
    assert functions[0]["description"] == "Edits files.\n\ninput must match this Lark grammar:\nstart: /.+/s"
    assert functions[0]["parameters"]["required"] == ["input"]
    assert functions[1]["description"] == "Tools of the editor.\n\nOpens."


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "open", "namespace": "mcp__idea"}, "mcp__idea__open"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]},
            "apply_patch",
        ),
    ],
)
def test_they_can_be_chosen(choice, name):
    use = response_tools({"tools": [PATCH, GROUP], "tool_choice": choice})
    assert ([tool.name for tool in use.callable], use.mode) == ([name], "required")
    shown = use.choice_object()
    assert {key: value for key, value in shown.items() if key != "mode"}.items() <= {**choice, **shown}.items()
    assert shown["name"] == name.rpartition("__")[2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\nb"}', "a\nb"),
        ('{"input": "cut of', "cut of"),
        ('{"input": "a"', "a"),
        ('{"inp', '{"inp'),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ("[" * 100_000, "[" * 100_000),
        ("", ""),
    ],
)
def test_the_text_of_a_custom_call(arguments, text):
    assert input_of(arguments) == text


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"type": "web_search"}, "tools[0] must be of type function, custom or namespace, not 'web_search': no tools"),
        ({**GROUP, "tools": [GROUP]}, "tools[0].tools[0] must be of type function or custom, not 'namespace'"),
        ({**GROUP, "tools": {}}, "tools[0].tools must be a list"),
        ({**GROUP, "name": None}, "tools[0] must have a name"),
        ({**GROUP, "more": 1}, "more"),
        ({**GROUP, "tools": [{"type": "function", "name": "a b"}]}, "tools[0].tools[0] must have a name of"),
        ({**PATCH, "format": {"type": "json"}}, "tools[0].format must be of type text or grammar"),
        ({**PATCH, "format": {"type": "grammar", "syntax": "ebnf"}}, "tools[0].format must have lark or regex"),
        ({**PATCH, "name": None}, "tools[0] must have a name of"),
        ({**PATCH, "parameters": {}}, "parameters"),
        ({**PATCH, "defer_loading": True}, "defer_loading"),
    ],
)
def test_others_are_refused_by_name(tool, message):
    with pytest.raises(ApiError) as error:
        response_tools({"tools": [tool]})
    assert message in error.value.message
    assert error.value.param == "tools"


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "custom_tool_call", "name": "a", "arguments": "{}"}, "arguments"),
        ({"type": "custom_tool_call", "name": "a", "input": 3}, "input[1] must have name and input as strings"),
        (
            {"type": "function_call", "name": "a", "arguments": "", "namespace": 3},
            "input[1].namespace must be a string",
        ),
    ],
)
def test_their_calls_are_checked(item, message):
    with pytest.raises(ApiError) as error:
        response_prompt(codex([item]), ToolUse())
    assert message in error.value.message
