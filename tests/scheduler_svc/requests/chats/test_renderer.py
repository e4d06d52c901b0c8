"""Which template renders a chat, and where: a child process has bounds, and its death ends one chat alone."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_svc.requests.chats import renderer as renderer_module
from scheduler_svc.requests.chats.door import RenderDoor, finished
from scheduler_svc.requests.chats.fields import (
    MAX_PROMPT_CHARS,
    ChatError,
    ChatFields,
    ChatJob,
    MessageFields,
    failed,
    read_answer,
    rendered,
)
from scheduler_svc.requests.chats.renderer import SHORT_CHARS, ChatRenderer, templates_of
from scheduler_svc.requests.chats.template import compile_template, render
from tests.helpers.models.chat_templates import CHATS, HERMES, TOOLS
from tests.helpers.models.chats import chat_of

SHORT = ChatFields((MessageFields("user", "Hello"),))
LONG = ChatFields((MessageFields("user", "Hello é " * 2000),))
LAST = "{{ messages[-1].content }}"


def own(template: str, chat: ChatFields = SHORT) -> ChatFields:
    return ChatFields(chat.messages, template=template)


@pytest.fixture(scope="module")
def door() -> Iterator[RenderDoor]:
    door = RenderDoor(5.0, max_bytes=256 * 2**20)
    yield door
    door.close()


async def refused(door: RenderDoor, template: str) -> tuple[str, str]:
    with pytest.raises(ChatError) as caught:
        await door.render(ChatJob(template, "template", SHORT, {}))
    return caught.value.field, str(caught.value)


async def test_a_child_renders_as_this_process_does(door: RenderDoor) -> None:
    special = {"bos_token": "<s>", "names": ["é"]}
    for messages in CHATS.values():
        chat = chat_of(messages, tools=TOOLS)
        assert await door.render(ChatJob(HERMES, "", chat, special)) == render(compile_template(HERMES), chat, special)
    whole = ChatFields((MessageFields("user", "é" * MAX_PROMPT_CHARS),))
    assert await door.render(ChatJob(LAST, "", whole, {})) == whole.messages[0].content


@pytest.mark.parametrize(
    ("template", "field", "message"),
    [
        ("{{ raise_exception('not this') }}", "", "the chat template refuses this chat: not this"),
        ("{% if %}", "template", "the chat template does not compile: line 1: Expected an expression"),
        ("{% for a in range(99999) %}{{ a }}{{ messages }}{% endfor %}", "", "the rendered chat has over 1048576"),
        ("{{ ('x' * 10 ** 9) | length }}", "", ""),
        ("{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "", ""),
    ],
)
async def test_a_child_survives_what_it_refuses(door: RenderDoor, template: str, field: str, message: str) -> None:
    assert await door.render(ChatJob(LAST, "", SHORT, {})) == "Hello"
    assert door.child is not None
    pid = door.child.pid
    found = await refused(door, template)
    assert found[0] in (field, "template")
    assert found[1].startswith(message)
    assert await door.render(ChatJob(LAST, "", SHORT, {})) == "Hello"
    assert door.child.pid == pid


async def test_a_template_without_an_end_is_ended(door: RenderDoor) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    quick = RenderDoor(0.5)
    assert await refused(quick, endless) == ("template", "the chat takes over 0.5 s to render")
    assert quick.child is None
    assert await quick.render(ChatJob(LAST, "", SHORT, {})) == "Hello"
    quick.close()


async def test_a_child_that_dies_is_replaced(door: RenderDoor) -> None:
    assert await door.render(ChatJob(LAST, "", SHORT, {})) == "Hello"
    assert door.child is not None
    pid = door.child.pid
    os.kill(pid, 9)
    assert await door.render(ChatJob(LAST, "", SHORT, {})) == "Hello"
    assert door.child.pid != pid


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.interpreter
async def test_a_child_has_no_secrets_of_its_parent(door: RenderDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENZA_TOKEN", "secret")
    other = RenderDoor(5.0)
    assert await other.render(ChatJob(LAST, "", SHORT, {})) == "Hello"
    assert other.child is not None
    assert b"secret" not in environment_of(other.child.pid)
    other.close()


def test_answers_are_texts_alone() -> None:
    assert read_answer(rendered("é").decode()) == "é"
    with pytest.raises(ChatError, match="no") as caught:
        read_answer(failed(ChatError("tools[0]", "no \ud800")).decode())
    assert caught.value.field == "tools[0]"
    for wrong in ("", "x", "e", "e[1]", 'e["a"]', 'e["a", 1]', "e{}", pickle.dumps(1).decode("latin-1")):
        with pytest.raises(ValueError, match=r"no answer|Expecting"):
            read_answer(wrong)


# ---------------------------------------------------------------- the choice


def text(chats: ChatRenderer, **fields: object) -> str:
    return finished(chats.render(ChatFields(SHORT.messages, **fields)))  # type: ignore[arg-type]


def test_templates_by_name() -> None:
    chats = ChatRenderer({"default": "d", "tool_use": "t", "rag": "r"}, {})
    assert text(chats) == "d"
    assert text(chats, tools=("{}",)) == "t"
    assert text(chats, tools=("{}",), template="rag") == text(chats, template="rag") == "r"
    assert text(ChatRenderer({"default": "d"}, {}), tools=("{}",)) == "d"
    assert (chats.shown_template, ChatRenderer({"default": "d"}, {}).shown_template) == ("t", "d")
    assert ChatRenderer({}, {}).shown_template == ""
    with pytest.raises(ChatError, match="one of the model's templates, rag, tool_use: none is the default"):
        text(ChatRenderer({"tool_use": "t", "rag": "r"}, {}))


def test_the_forms_of_a_tokenizers_templates() -> None:
    assert templates_of("x") == {"default": "x"}
    assert templates_of({"default": "x", "rag": "y", "empty": None}) == {"default": "x", "rag": "y"}
    for nothing in (None, "", {}, []):
        assert templates_of(nothing) == {}


async def test_where_chats_are_rendered() -> None:
    chats = ChatRenderer({"default": LAST, "rag": "r"}, {"bos_token": "B"})
    of_model, of_long, of_requests = chats._of_short, chats._of_long, chats._of_requests
    try:
        assert await chats.render(SHORT) == "Hello"
        assert await chats.render(own("rag")) == "r"
        just = ChatFields((MessageFields("user", "x" * (SHORT_CHARS - 32)),))
        assert await chats.render(just) == just.messages[0].content
        assert (of_long.child, of_requests.child) == (None, None)
        many = ChatFields((MessageFields("user", ""),) * 200)
        assert await chats.render(many) == "", "each message takes its time"
        assert await chats.render(LONG) == LONG.messages[0].content
        assert of_requests.child is None
        assert await chats.render(own("{{ bos_token }}" + LAST, LONG)) == f"B{LONG.messages[0].content}"
        assert len({door.child.pid for door in (of_model, of_long, of_requests) if door.child}) == 3
    finally:
        chats.close()
    assert (of_model.child, of_long.child, of_requests.child) == (None, None, None)


async def test_a_request_cannot_push_the_models_template_out() -> None:
    chats = ChatRenderer({"default": LAST}, {})
    try:
        assert await chats.render(SHORT) == "Hello"
        form = chats._forms[LAST]
        for index in range(70):
            assert await chats.render(own(f"{index}")) == f"{index}"
        assert await chats.render(SHORT) == "Hello"
        assert chats._forms == {LAST: form}
        assert len(chats._forms_of_requests) == 64
    finally:
        chats.close()


async def test_a_cancelled_chat_leaves_no_answer_behind(door: RenderDoor) -> None:
    waiting = [asyncio.create_task(door.render(ChatJob(LAST, "", own("", LONG), {}))) for _ in range(3)]
    await asyncio.sleep(0)
    for each in waiting:
        each.cancel()
    assert await door.render(ChatJob(LAST, "", SHORT, {})) == "Hello"


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


async def test_the_models_template_has_bounds_on_each_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loops on one text alone: others of the same moment are rendered, and the event loop goes on."""
    monkeypatch.setattr(renderer_module, "RENDER_S", 0.5)
    chats = ChatRenderer({"default": "{% if messages[-1].content == 'loop' %}" + ENDLESS + "{% endif %}" + LAST}, {})
    try:
        assert await chats.render(SHORT) == "Hello"
        turns, looping = 0, asyncio.create_task(chats.render(ChatFields((MessageFields("user", "loop"),))))
        while not looping.done():
            await asyncio.sleep(0.001)
            turns += 1
        with pytest.raises(ChatError, match=r"the chat takes over 0.5 s to render"):
            await looping
        assert turns > 20, "of 500 or so, where the machine has time"
        assert await chats.render(SHORT) == "Hello"
    finally:
        chats.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ENDLESS, "the chat takes over 0.5 s to render"),
        ("{% if %}", "the chat template does not compile: line 1"),
        ("{{ ('x' * (2 * 10 ** 9)) | length }}{{ messages[0].content }}", "memory"),
    ],
)
async def test_a_template_that_is_none_is_loaded_and_refuses_chats(
    template: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer_module, "RENDER_S", 0.5)
    chats = ChatRenderer({"default": template}, {})
    chats.prepare()
    try:
        with pytest.raises(ChatError, match=message):
            await chats.render(SHORT)
    finally:
        chats.close()
