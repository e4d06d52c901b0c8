"""The form that a template shows is found by rendering, and what it shows in none is refused by name."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest

from scheduler_svc.requests.chats.fields import ChatError, TemplateForm
from scheduler_svc.requests.chats.forms import ContentFormat, probe
from scheduler_svc.requests.chats.renderer import ChatRenderer
from scheduler_svc.requests.chats.template import compile_template, render
from tests.helpers.models.chat_templates import HERMES, LLAMA, MISTRAL, QWEN_THINKING, TOOLS, USER
from tests.helpers.models.chats import chat_of

pytestmark = pytest.mark.slow

GUARD = (
    "{% for m in messages %}{{ m.role }}: "
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %};{% endfor %}"
)
"""Llama Guard 3's idiom."""
CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}<CALL>{% endfor %}"
    "{% else %}{{ m.content }}{% endif %};{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
NAME = "{{ c.function.name }}"
CALLED: dict[str, Any] = {
    "role": "assistant",
    "tool_calls": [{"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "content": "sunny"}


compiled = cache(compile_template)
"""The search renders a template some ten times, and each test a few."""


def form_of(template: str, wanted: ContentFormat = "auto") -> TemplateForm:
    """What the search finds, all in this process."""
    search = probe(template, "", SPECIAL, wanted)
    answer: Any = None
    try:
        while True:
            job = search.send(answer)
            try:
                answer = render(compiled(job.template), job.chat, SPECIAL, job.form)
            except ChatError as error:
                answer = error
    except StopIteration as end:
        return end.value


def changes(template: str, wanted: ContentFormat = "auto") -> dict[str, Any]:
    plain = TemplateForm()
    found = dataclasses.asdict(form_of(template, wanted))
    return {name: value for name, value in found.items() if value != getattr(plain, name)}


def text_of(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    form = form_of(template)
    return render(compiled(template), chat_of(messages, **options), {}, form)


def test_what_transformers_passes_is_kept_where_it_is_shown() -> None:
    assert changes(HERMES) == changes(HERMES, "string") == {}
    assert changes(MISTRAL) == {"shows_system": False, "short_ids": True}, "but in a turn that follows"


def test_a_template_that_walks_through_tools_serves_chats_without_any() -> None:
    """As Hermes 2 Pro's for tools, given as the only one."""
    walks = "{% for tool in tools %}{{ tool | tojson }};{% endfor %}" + HERMES
    assert changes(walks) == {"empty_tools": True}
    assert text_of(walks, [USER]) == text_of(HERMES, [USER])
    assert text_of(walks, [USER, CALLED, RESULT]) == text_of(HERMES, [USER, CALLED, RESULT])
    assert "get_weather" in text_of(walks, [USER], tools=TOOLS)
    needs = "{% if not tools %}{{ raise_exception('tools!') }}{% endif %}" + HERMES
    assert changes(needs) == {}, "and is refused without, in its own words"
    with pytest.raises(ChatError, match="tools!"):
        text_of(needs, [USER])


def test_parts_where_a_template_loops_over_them() -> None:
    assert form_of(GUARD).parts == {"user", "assistant", "system", "tool"} - {"tool"}
    assert form_of(GUARD, "string").parts == frozenset()
    assert form_of("{{ messages[0].content }}", "parts").parts == {"user", "assistant", "system", "tool"}
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "are you?"}]
    for content in (parts, "How are you?"):
        assert text_of(GUARD, [{"role": "user", "content": content}]) == "user: How are you?;"
    opened = [USER, {"role": "assistant", "content": "It "}]
    chat = {"add_generation_prompt": False, "continue_final_message": True}
    assert text_of(GUARD, opened, **chat).endswith("assistant: It ")


def test_parts_of_one_role_alone() -> None:
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content[0].text }}{% else %}{{ m.content + '.' }}"
    assert form_of(template + "{% endif %}{% endfor %}").parts == {"user"}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("writes", "content", "as_text"),
    [
        (NAME + "{{ c.function.arguments | tojson }}", "given", False),
        ("{{ m.content.strip() }}" + NAME + "{{ c.function.arguments | tojson }}", "empty", False),
        ("{% if m.content is none %}" + NAME + "{{ c.function.arguments | tojson }}{% endif %}", "null", False),
        ("{% if 'content' not in m %}" + NAME + "{{ c.function.arguments | tojson }}{% endif %}", "absent", False),
        (NAME + "{{ '' + c.function.arguments }}", "given", True),
        (NAME + "{{ c.function.arguments }}", "given", True),
        ("{{ m.content }}" + NAME + "{{ c.function.arguments | tojson }}", "given", False),
    ],
)  # fmt: skip
def test_the_form_of_calls(writes: str, content: str, as_text: bool) -> None:
    template = CALLS.replace("<CALL>", writes)
    form = form_of(template)
    assert (form.call_content, form.text_arguments, form.no_calls) == (content, as_text, "")
    for given in ({}, {"content": None}, {"content": ""}):
        text = text_of(template, [USER, CALLED | given, RESULT], tools=TOOLS)
        assert 'f{"a": "b"};sunny;' in text
        assert "None" not in text.partition("[{")[0]


CUT = ['{"city": "Os', '{"city": "Oslo"', "[1, 2]", '"text"', "not JSON", '{"a": NaN}', '{"a": ' + "9" * 5000 + "}"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("arguments", CUT, ids=lambda text: text[:12])
def test_arguments_that_are_no_object_keep_their_text(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, RESULT]
    items = NAME + "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
    raw = NAME + "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    for writes, expected in ((items, f"farguments={arguments};"), (raw, f"f{arguments};")):
        assert expected in text_of(CALLS.replace("<CALL>", writes), messages)
    assert f";f{arguments};" in text_of(CALLS.replace("<CALL>", NAME + "{{ '' + c.function.arguments }}"), messages)


def test_arguments_that_are_nothing_or_have_lines() -> None:
    template = CALLS.replace("<CALL>", NAME + "{{ c.function.arguments | tojson }}")
    for given, expected in ((None, "{}"), ("", "{}"), ("null", "{}"), ('{"a": "b\nc"}', '{"a": "b\\nc"}')):
        call = {"function": {"name": "f", "arguments": given}}
        assert f";f{expected};" in text_of(template, [USER, {"role": "assistant", "tool_calls": [call]}])


def test_arguments_that_no_form_shows_are_refused_by_name() -> None:
    template = CALLS.replace("<CALL>", "{{ c.function.arguments.qmname }}qmname")
    form = form_of(template)
    assert form.raw_arguments == "none"
    call = {"function": {"name": "f", "arguments": "["}}
    with pytest.raises(ChatError, match="is no JSON object, and the chat template shows no other") as caught:
        render(compiled(template), chat_of([USER, {"role": "assistant", "tool_calls": [call]}]), {}, form)
    assert caught.value.field == "messages[1].tool_calls[0].arguments"


async def refused(template: str, messages: list[dict[str, Any]], **options: Any) -> tuple[str, str]:
    chats = ChatRenderer({"default": template}, {}, trusts_requests=True)
    try:
        with pytest.raises(ChatError) as caught:
            await chats.render(chat_of(messages, **options))
    finally:
        chats.close()
    return caught.value.field, str(caught.value)


async def test_what_no_form_shows_is_refused_at_the_first_turn() -> None:
    plain = "{% for m in messages %}{{ m.content or '' }}{% endfor %}"
    field, message = await refused(plain, [USER], tools=TOOLS)
    assert (field, message) == ("tools", "the chat template never shows tools to the model")
    field, message = await refused(plain + "{{ tools or '' }}", [USER], tools=TOOLS)
    assert (field, message[:60]) == ("tools", "the chat template shows no call of a tool in any form: it le")
    field, message = await refused(plain, [USER, CALLED, RESULT])
    assert (field, message[:40]) == ("messages[1].tool_calls", "the chat template shows no call of a too")
    field, _ = await refused("{{ messages }}{{ tools }}", [USER], tools=TOOLS, chat_template=plain)
    assert field == "tools", "a request's own template"


async def test_calls_without_tools_have_the_template_that_shows_them() -> None:
    chats = ChatRenderer({"default": "{% for m in messages %}{{ m.content }}{% endfor %}", "tool_use": HERMES}, {})
    try:
        assert "<tool_call>" in await chats.render(chat_of([USER, CALLED, RESULT]))
        assert await chats.render(chat_of([USER])) == USER["content"]
    finally:
        chats.close()


# ---------------------------------------------------------------- texts of the system

ALL = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
DROPS = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)
LAST_WINS = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
    "{% endif %}{% endfor %}<system>{{ ns.s }}{% for m in messages if m.role != 'system' %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def said(*turns: str) -> list[dict[str, str]]:
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    return [{"role": roles[turn[0]], "content": turn} for turn in turns]


@pytest.mark.parametrize("template", [ALL, FIRST, DROPS, LAST_WINS])
def test_leading_texts_of_the_system_are_one_message(template: str) -> None:
    for leading in (("s1", "d1"), ("d1", "s1"), ("s1", "s2", "d1")):
        joined = "\n\n".join(leading)
        assert text_of(template, said(*leading, "u1")) == f"<system>{joined}<user>u1"
    assert text_of(template, said("d1", "u1")) == "<system>d1<user>u1"


def test_later_texts_of_the_system_stand_where_the_template_shows_them() -> None:
    chat = said("s1", "u1", "a1", "d2", "u2")
    assert text_of(ALL, chat) == "<system>s1<user>u1<assistant>a1<system>d2<user>u2"
    for template in (FIRST, DROPS, LAST_WINS):
        assert text_of(template, chat) == "<system>s1<user>u1<assistant>a1<user>d2\n\nu2"
    assert text_of(LAST_WINS, said("u1", "s1")) == "<system>s1<user>u1", "it is shown"
    for template in (FIRST, DROPS):
        assert text_of(template, said("u1", "s1")) == "<user>u1\n\ns1"
        assert text_of(template, said("u1", "a1", "s1", "d2")).endswith("<assistant>a1<user>s1\n\nd2")
    result = {"role": "tool", "content": "r"}
    told = [*said("s1", "u1", "a1"), {"role": "system", "content": "s2"}, result, *said("u2")]
    assert text_of(FIRST, told) == "<system>s1<user>u1<assistant>a1<tool>r<user>s2\n\nu2"


def test_a_template_without_a_system_has_its_text_in_the_first_turn() -> None:
    assert text_of(NO_SYSTEM, said("s1", "d1", "u1", "a1", "u2")) == "<user>s1\n\nd1\n\nu1<assistant>a1<user>u2"
    assert text_of(NO_SYSTEM, said("s1", "u1", "a1", "s2", "u2")) == "<user>s1\n\nu1<assistant>a1<user>s2\n\nu2"
    assert text_of(NO_SYSTEM, said("s1")) == "<user>s1"


def test_a_text_that_is_shown_nowhere_is_refused_by_name() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' or loop.first %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ChatError, match="shows no system message here, nor its text in a turn of the user") as caught:
        text_of(template, said("u1", "a1", "s1", "u2"))
    assert caught.value.field == "messages[2].role"


def test_toy_templates_of_the_field() -> None:
    assert form_of(LLAMA).no_calls == ""
    assert changes(QWEN_THINKING) == {
        "raw_arguments": "object",
        "no_tools": "the chat template never shows tools to the model",
    }


OWN_ROLES = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant', 'ipython') %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]])
def test_a_role_that_a_template_does_not_show(before: list[dict[str, Any]]) -> None:
    """Llama 3 has ipython: a template without it left the result of a tool out, without a word."""
    template = compile_template(OWN_ROLES)
    turns = [*before, {"role": "user", "content": "Hello"}]
    shown = render(template, chat_of([*turns, {"role": "ipython", "content": "4 degrees"}]), {})
    assert "<ipython>4 degrees" in shown
    assert render(template, chat_of([*turns, {"role": "ipython", "content": ""}]), {}).endswith("<ipython>")
    for role in ("function", "critic", "User"):
        with pytest.raises(ChatError, match=f"the chat template shows no message of the role '{role}'") as caught:
            render(template, chat_of([*turns, {"role": role, "content": "x"}]), {})
        assert caught.value.field == f"messages[{len(turns)}].role"
    strict = compile_template(
        "{% for m in messages %}{{ raise_exception('no ' ~ m.role) if m.role == 'critic' }}{% endfor %}"
    )
    with pytest.raises(ChatError, match="no critic"):
        render(strict, chat_of([*turns, {"role": "critic", "content": "x"}]), {})
