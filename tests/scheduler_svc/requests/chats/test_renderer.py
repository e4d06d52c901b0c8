"""Which template renders a chat, and where: a child process has bounds, and its death ends one chat alone."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_svc.requests.chats import renderer as renderer_module
from scheduler_svc.requests.chats.door import RenderDoor
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
from scheduler_svc.requests.chats.renderer import INLINE_CHARS, ChatRenderer, templates_of
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
    return chats.render(ChatFields(SHORT.messages, **fields))  # type: ignore[arg-type]


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
    assert chats.is_short(SHORT)
    assert chats.is_short(own("rag"))
    assert not chats.is_short(LONG)
    assert not chats.is_short(own("{{ 'mine' }}"))
    for size, is_short in ((INLINE_CHARS - 32, True), (INLINE_CHARS - 31, False)):
        assert chats.is_short(ChatFields((MessageFields("user", "x" * size),))) == is_short
    many = ChatFields((MessageFields("user", ""),) * 200)
    assert not chats.is_short(many), "each message takes its time"
    try:
        assert await chats.render_off_loop(SHORT) == "Hello"
        assert await chats.render_off_loop(own("rag")) == "r"
        assert (chats._of_model.child, chats._of_requests.child) == (None, None)
        assert await chats.render_off_loop(LONG) == LONG.messages[0].content
        assert chats._of_requests.child is None
        assert await chats.render_off_loop(own("{{ bos_token }}" + LAST, LONG)) == f"B{LONG.messages[0].content}"
        assert chats._of_model.child.pid != chats._of_requests.child.pid  # type: ignore[union-attr]
    finally:
        chats.close()


async def test_a_request_cannot_push_the_models_template_out(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def noting(source: str) -> object:
        compiled.append(source)
        return compile_template(source)

    monkeypatch.setattr(renderer_module, "compile_template", noting)
    chats = ChatRenderer({"default": LAST}, {})
    try:
        for index in range(40):
            assert await chats.render_off_loop(own(f"{index}")) == f"{index}"
            assert chats.render(SHORT) == "Hello"
    finally:
        chats.close()
    assert compiled == [LAST]
