"""Chats with tools, documents and templates of requests, from the clients' calls to token ids, over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cadenza import AsyncClient, ChatMessage, Client, SamplingParams, ToolCall
from cadenza.calls.loop_thread import LoopThread
from cadenza.errors import FailedPreconditionError, InvalidRequestError
from cadenza.info import AddedToken
from scheduler_svc.requests.chats import renderer
from tests.helpers.models.chat_templates import CHATS, HERMES, QWEN_THINKING, TOOLS, USER
from tests.helpers.models.chats import with_text_arguments
from tests.helpers.models.toy_tokenizers import SPECIAL, hf_byte_level
from tests.helpers.scheduler.scheduler_world import World, world
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor

PARAMS = SamplingParams(max_tokens=1)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LONG = [{"role": "system", "content": "é long " * 800}, USER]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    inner = hf_byte_level()
    inner.add_tokens(["<tool_call>", "</tool_call>"])
    inner.chat_template = {"default": QWEN_THINKING, "tool_use": HERMES}
    return inner


@pytest.fixture(scope="module")
def town(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A scheduler that trusts templates of requests, on the clients' own loop, so that tests may block."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    executor = ScriptedExecutor(max_model_len=8192, num_blocks=1024)
    loop, opened = LoopThread.shared(), world(executor, tokenizer=str(folder), trust_request_chat_template=True)
    yield loop.run(opened.__aenter__())
    loop.run(opened.__aexit__(None, None, None))


@pytest.fixture
def client(town: World) -> Iterator[Client]:
    with Client(town.target) as client:
        yield client


def expected(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """The chat's token ids as transformers makes them."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **({"add_generation_prompt": True} | options))
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", CHATS)
def test_calls_and_tools_reach_the_template(client: Client, tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    messages = CHATS[name]
    ids = expected(tokenizer, messages, tools=TOOLS)
    assert ids != expected(tokenizer, messages), "tools choose another template"
    for form in (messages, with_text_arguments(messages)):
        assert client.tokenize(form, tools=TOOLS) == ids
    assert client.chat(messages, PARAMS, tools=TOOLS)[0].prompt_token_ids == ids
    assert next(client.stream_chat(messages, PARAMS, tools=TOOLS)).prompt_token_ids == ids


def test_long_chats_and_arguments_of_templates(client: Client, tokenizer: PreTrainedTokenizerFast) -> None:
    for messages in (LONG, [*LONG, *CHATS["answered"]], [USER]):
        for given in ({}, {"enable_thinking": False}):
            chats = client.chat([messages, [USER]], PARAMS, chat_template_kwargs=given)
            assert chats[0].prompt_token_ids == expected(tokenizer, messages, **given)
            assert chats[1].prompt_token_ids == expected(tokenizer, [USER], **given)


def test_messages_as_objects(client: Client, tokenizer: PreTrainedTokenizerFast) -> None:
    call = ToolCall("get_weather", '{"city": "北京", "days": 2, "exact": true, "near": [1.5, null]}', "abcdefgh1")
    objects = [ChatMessage("user", "Weather in 北京?"), ChatMessage("assistant", tool_calls=(call,))]
    assert client.tokenize(objects) == expected(tokenizer, [USER, CHATS["called"][-1]])


def test_a_template_of_the_request(client: Client, tokenizer: PreTrainedTokenizerFast) -> None:
    template = "{% for d in documents %}[{{ d.t }}]{% endfor %}{{ greeting }}{{ eos_token }}"
    options = {"documents": [{"t": "é"}], "chat_template_kwargs": {"greeting": "Hi"}, "chat_template": template}
    ids = tokenizer.encode("[é]Hi<|endoftext|>")
    assert client.chat([USER], PARAMS, **options)[0].prompt_token_ids == ids
    assert client.tokenize([USER], **options) == ids
    assert client.tokenize([USER], chat_template="tool_use") == expected(tokenizer, [USER], chat_template=HERMES)
    for wrong, field in (("{{", "template"), ("{{ raise_exception('no') }}", ""), ("{{ ''.__class__.x }}", "")):
        with pytest.raises(InvalidRequestError) as caught:
            client.chat([USER], PARAMS, chat_template=wrong)
        assert caught.value.field_violations[0].field == f"prompt[0].chat{'.' * bool(field)}{field}"


def test_what_the_model_is_like(client: Client, tokenizer: PreTrainedTokenizerFast) -> None:
    info = client.model_info()
    assert info.has_chat_template
    assert info.chat_template == HERMES, "the one that shows how calls are written"
    first = len(tokenizer) - 2
    named = [AddedToken(index, text, True) for index, text in enumerate(SPECIAL)]
    assert info.added_tokens == [
        *named,
        AddedToken(first, "<tool_call>", False),
        AddedToken(first + 1, "</tool_call>", False),
    ]
    assert client.model_info() == info


@pytest.fixture
async def own_world(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    """A scheduler whose requests' templates have half a second, and with a template of its own."""
    monkeypatch.setattr(renderer, "RENDER_S", 0.5)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "own.jinja").write_text("own: {{ messages[-1].content }}")
    options = {"chat_template": str(tmp_path / "own.jinja"), "trust_request_chat_template": True}
    async with world(tokenizer=str(tmp_path), **options) as w:
        yield w


async def test_a_template_without_an_end_holds_up_nobody_else(own_world: World) -> None:
    async with AsyncClient(own_world.target) as client:
        hostile = asyncio.create_task(client.tokenize([USER], chat_template=ENDLESS))
        long = "Hello " * 1000
        hello = await client.tokenize("own: Hello")
        for _ in range(3):
            assert await client.tokenize([{"role": "user", "content": "Hello"}]) == hello
            assert (await client.tokenize([{"role": "user", "content": long}]))[:2] == hello[:2]
        with pytest.raises(InvalidRequestError, match=r"the chat takes over 0.5 s to render"):
            await hostile
        assert await client.tokenize([USER], chat_template="own: Hello") == hello
        info = await client.model_info()
        assert info.chat_template == "own: {{ messages[-1].content }}"


async def test_templates_of_requests_need_trust(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    async with world(tokenizer=str(tmp_path)) as w, AsyncClient(w.target) as client:
        with pytest.raises(FailedPreconditionError, match="--trust-request-chat-template"):
            await client.tokenize([USER], chat_template="{{ 1 }}")
        with pytest.raises(FailedPreconditionError, match="--trust-request-chat-template"):
            await client.chat([USER], PARAMS, chat_template="{{ 1 }}")
        assert await client.tokenize([USER], chat_template="tool_use")
