"""The field's own templates: no text of a chat is lost, whatever the forms in which clients send it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from scheduler_svc.requests.chats.fields import ChatError
from scheduler_svc.requests.chats.renderer import ChatRenderer
from tests.helpers import real_files
from tests.helpers.models.chats import chat_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Says how the weather is.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "A city."}},
                "required": ["city"],
            },
        },
    }
]
NO_TOOLS = {
    "HuggingFaceTB-SmolLM3-3B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "google-gemma-2-2b-it",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
"""They never show tools."""
NO_CALLS = {
    "HuggingFaceTB-SmolLM3-3B",
    "google-gemma-2-2b-it",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
"""They show no call, or refuse its result, in any form."""
BROKEN_WITH_TOOLS: set[str] = set()
"""They refuse tools, with an error of their own."""
OWN_TOOLS = "fireworks-ai-llama-3-firefunction-v2"
"""It reads its tools, as text, and the time from arguments of the template, and refuses every chat without them."""
USER = {"role": "user", "content": "How is the weather in Oslo?"}


@pytest.fixture
async def chats() -> AsyncIterator[dict[str, ChatRenderer]]:
    made = {name: ChatRenderer({"default": text}, SPECIAL) for name, text in real_files.templates().items()}
    assert len(made) == 70
    yield made
    for each in made.values():
        each.close()


async def text_of(chats: ChatRenderer, messages: list[dict[str, Any]], name: str = "", **options: Any) -> str:
    if name == OWN_TOOLS:
        options["chat_template_kwargs"] = {"functions": "none", "datetime": "now"}
    return await chats.render(chat_of(messages, **options))


def called(content: dict[str, Any], arguments: Any = '{"city": "Oslo-1"}') -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "abcdefgh1", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "abcdefgh1", "content": "4 degrees"}
    return [USER, {"role": "assistant", "tool_calls": [call], **content}, result]


async def test_texts_of_the_system_are_shown(chats: dict[str, ChatRenderer]) -> None:
    turn = [USER, {"role": "assistant", "content": "Fine."}]
    system, developer = {"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Say degrees."}
    later = {"role": "user", "content": "And tomorrow?"}
    for name, each in chats.items():
        for leading in ([system, developer], [developer, system], [system, system | {"content": "Say degrees."}]):
            text = await text_of(each, [*leading, USER], name)
            assert all(said in text for said in ("Be brief.", "Say degrees.", USER["content"])), name
        for messages in (
            [system, *turn, developer, later],
            [system, *turn, later, developer],
            [*turn, developer, later],
        ):
            text = await text_of(each, messages, name)
            assert all(message["content"] in text for message in messages), (name, messages)


async def test_content_as_parts_is_that_of_a_text(chats: dict[str, ChatRenderer]) -> None:
    parts = [{"type": "text", "text": "How is the weather "}, {"type": "text", "text": "in Oslo?"}]
    for name, each in chats.items():
        text = await text_of(each, [USER], name)
        assert USER["content"] in text, name
        assert await text_of(each, [{"role": "user", "content": parts}], name) == text, name


async def test_a_turn_of_calls_alone_is_shown_in_every_form(chats: dict[str, ChatRenderer]) -> None:
    for name, each in chats.items():
        for content in ({}, {"content": None}, {"content": ""}):
            for tools in ({}, {"tools": TOOLS}):
                if name == OWN_TOOLS:
                    continue
                if name in NO_CALLS or (tools and name in NO_TOOLS | BROKEN_WITH_TOOLS):
                    with pytest.raises(ChatError, match=r"chat template (never shows|shows no|refuses)") as caught:
                        await text_of(each, called(content), name, **tools)
                    path = "tools" if tools else "messages[1].tool_calls"
                    assert caught.value.field == ("" if name in BROKEN_WITH_TOOLS else path), name
                    continue
                text = await text_of(each, called(content), name, **tools)
                assert all(said in text for said in ("Oslo-1", "city", "4 degrees")), (name, content)
                assert '\\"city\\"' not in text, name


async def test_tools_are_refused_at_the_first_turn_where_the_second_is_not_shown(
    chats: dict[str, ChatRenderer],
) -> None:
    refused = set()
    for name, each in chats.items():
        if name == OWN_TOOLS:
            continue
        try:
            text = await text_of(each, [USER], tools=TOOLS)
        except ChatError as error:
            refused.add((name, error.field))
        else:
            assert "get_weather" in text, name
    by_name = {(name, "tools") for name in NO_TOOLS | NO_CALLS}
    assert refused == by_name | {(name, "") for name in BROKEN_WITH_TOOLS}


@pytest.mark.parametrize(
    "arguments", ['{"city": "Oslo-1', '{"city": "Oslo-1\n2"}', '["Oslo-1"]', "null", None, ""], ids=repr
)
async def test_arguments_that_are_cut_keep_their_text(chats: dict[str, ChatRenderer], arguments: str | None) -> None:
    for name, each in chats.items():
        if name in NO_CALLS | NO_TOOLS | BROKEN_WITH_TOOLS | {OWN_TOOLS}:
            continue
        text = await text_of(each, called({}, arguments), tools=TOOLS)
        assert "4 degrees" in text, name
        if arguments and arguments.endswith("-1"):
            assert arguments in text or json.dumps(arguments)[1:-1] in text, name
        if arguments and "Oslo" in arguments:
            assert "Oslo-1" in text, name
