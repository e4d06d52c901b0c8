"""History of every API before templates that are strict about its form, and templates that show no tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway_svc.requests.messages import messages_prompt
from gateway_svc.requests.tools import message_tools
from tests.gateway_svc.tools.test_tool_calls import ANTHROPIC, CHAT, FLAT, MESSAGES, RESPONSES, TOOLS, USER
from tests.helpers.gateway.gateway import Gateway, gateway
from tests.helpers.models.chat_templates import HERMES
from tests.helpers.models.toy_tokenizers import hf_byte_level
from tests.helpers.scheduler.scheduler_world import world
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor

pytestmark = pytest.mark.slow

STRICT = (
    "{% if messages | selectattr('role', 'equalto', 'system') | list | length > 1 %}"
    "{{ raise_exception('one system message') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% endif %}{% endfor %}"
) + HERMES
"""It reads the content of each turn of the assistant, as Qwen3's does, and takes one system message, as Qwen3.5's."""
SHORT = {"max_tokens": 4}
PLAIN = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
"""As SmolLM2's: it shows no tools."""


@pytest.fixture
async def gateways(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Gateway]:
    inner = hf_byte_level()
    inner.chat_template = request.param
    inner.save_pretrained(tmp_path)
    async with (
        world(ScriptedExecutor(max_model_len=4096), tokenizer=str(tmp_path)) as w,
        gateway(w.target, tool_call_parser="hermes") as g,
    ):
        yield g


def bodies(arguments: Any) -> list[tuple[str, dict[str, Any]]]:
    """A call alone and its result on each API, as its answer is sent back."""
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    chats = [
        {"messages": [USER, {"role": "assistant", "tool_calls": [call], **content}, result], "tools": TOOLS, **SHORT}
        for content in ({}, {"content": None}, {"content": ""}, {"content": []})
    ]
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    use = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"INVALID_JSON": arguments}}
    turns = [USER, {"role": "assistant", "content": [use]}]
    answered = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}]}
    return [
        *((CHAT, body) for body in chats),
        (RESPONSES, {"input": items, "tools": FLAT, "max_output_tokens": 4}),
        (MESSAGES, {"messages": [*turns, answered], "tools": ANTHROPIC, "max_tokens": 4}),
    ]


@pytest.mark.parametrize("gateways", [STRICT], indirect=True, ids=["strict"])
@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', '{"city": "Os', '{"city": "Os\nlo"}', "null"])
async def test_an_answer_that_is_a_call_alone_can_be_sent_back(gateways: Gateway, arguments: str) -> None:
    for path, body in bodies(arguments):
        answer = await gateways.post(path, body)
        usage = answer["usage"]
        assert usage.get("prompt_tokens", usage.get("input_tokens")) > 100


def test_arguments_of_an_answer_that_are_no_json_are_the_models_text_again() -> None:
    (_, _, _, _, _, (_, body)) = bodies('{"city": "Os')
    prompt = messages_prompt(body, message_tools(body))
    assert prompt.messages[1].tool_calls[0].arguments == '{"city": "Os'


@pytest.mark.parametrize("gateways", [STRICT], indirect=True, ids=["strict"])
async def test_system_and_developer_together(gateways: Gateway) -> None:
    system, developer = {"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Say degrees."}
    said = {"role": "assistant", "content": "Fine."}
    for messages in ([system, developer, USER], [developer, system, USER], [system, USER, said, developer, USER]):
        await gateways.post(CHAT, {"messages": messages, **SHORT})
    await gateways.post(RESPONSES, {"instructions": "Be brief.", "input": [developer, USER], "max_output_tokens": 4})
    await gateways.post(MESSAGES, {"system": "Be brief.", "messages": [system, USER], "max_tokens": 4})
    await gateways.post(MESSAGES, {"system": "Be brief.", "messages": [USER, said, system, USER], "max_tokens": 4})


@pytest.mark.parametrize("gateways", [PLAIN], indirect=True, ids=["plain"])
async def test_tools_that_the_model_would_not_see_are_refused(gateways: Gateway) -> None:
    for path, body in (
        (CHAT, {"messages": [USER], "tools": TOOLS}),
        (RESPONSES, {"input": "Weather?", "tools": FLAT}),
        (MESSAGES, {"messages": [USER], "tools": ANTHROPIC, "max_tokens": 4}),
        (f"{MESSAGES}/count_tokens", {"messages": [USER], "tools": ANTHROPIC}),
        ("/tokenize", {"messages": [USER], "tools": TOOLS}),
    ):
        answer = await gateways.post(path, body, status=400)
        assert answer["error"]["message"] == "tools: the chat template never shows tools to the model"
        assert answer["error"].get("param", "tools") == "tools"
    await gateways.post(CHAT, {"messages": [USER], "tools": TOOLS, "tool_choice": "none", **SHORT})
