"""Templates: the same text as transformers', and what is not JSON, or no template, refused by name."""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any

import pytest

from scheduler_svc.requests.chats.fields import MAX_PROMPT_CHARS, ChatError, ChatFields, MessageFields
from scheduler_svc.requests.chats.template import compile_template, render
from tests.helpers.models.chat_templates import (
    ANSWER,
    CHATS,
    HERMES,
    LLAMA,
    MISTRAL,
    QWEN_THINKING,
    TEMPLATES,
    TOOLS,
    USER,
)
from tests.helpers.models.chats import chat_of, with_text_arguments
from tests.helpers.models.toy_tokenizers import hf_byte_level

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = (MessageFields("user", "Hello"),)


def text_of(template: str, chat: ChatFields) -> str:
    return render(compile_template(template), chat, SPECIAL)


def refused(chat: ChatFields, template: str = HERMES) -> tuple[str, str]:
    with pytest.raises(ChatError) as caught:
        text_of(template, chat)
    return caught.value.field, str(caught.value)


@functools.cache
def tokenizer() -> Any:
    inner = hf_byte_level(template=False)
    inner.add_special_tokens(SPECIAL)
    return inner


def expected(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """What transformers makes of a chat."""
    kwargs = options.pop("chat_template_kwargs", {})
    options.setdefault("add_generation_prompt", True)
    return str(tokenizer().apply_chat_template(messages, chat_template=template, tokenize=False, **options, **kwargs))


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"add_generation_prompt": False}], ids=str)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(name: str, chat: str, options: dict[str, Any]) -> None:
    template, messages = TEMPLATES[name], CHATS[chat]
    for form in (messages, with_text_arguments(messages)):
        assert text_of(template, chat_of(form, **options)) == expected(template, messages, **options)


@pytest.mark.parametrize(
    "messages",
    [[USER, ANSWER], [USER, {"role": "assistant", "content": "It  "}], [USER, {"role": "assistant", "content": ""}]],
)
@pytest.mark.parametrize("template", [HERMES, LLAMA, MISTRAL])
def test_an_open_end_is_that_of_transformers(template: str, messages: list[dict[str, Any]]) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert text_of(template, chat_of(messages, **options)) == expected(template, messages, **options)


def test_an_open_end_that_the_template_leaves_out() -> None:
    chat = chat_of([USER, ANSWER], add_generation_prompt=False, continue_final_message=True)
    for template in ("{{ messages[0].content }}", "{{ messages[-1].content | replace('21', '22') }}"):
        assert refused(chat, template)[1].endswith("so it cannot be continued")


def test_arguments_of_the_template() -> None:
    given = {"enable_thinking": False}
    text = text_of(QWEN_THINKING, chat_of([USER], chat_template_kwargs=given))
    assert text == expected(QWEN_THINKING, [USER], chat_template_kwargs=given)
    assert text.endswith("<think>\n\n</think>\n\n")
    assert "Today: long ago" in text_of(LLAMA, chat_of([USER], chat_template_kwargs={"date_string": "long ago"}))
    assert f"Today: {datetime.datetime.now():%d %b %Y}" in text_of(LLAMA, chat_of([USER]))
    assert text_of("{{ bos_token }}", chat_of([USER], chat_template_kwargs={"bos_token": "B"})) == "B"
    documents = [{"title": "a", "text": "é"}, {"title": "b"}]
    template = "{% for d in documents or [] %}{{ d.title }}{{ d.text }}{% endfor %}{{ documents is none }}"
    assert text_of(template, chat_of([USER], documents=documents)) == "aébFalse"
    assert text_of(template, chat_of([USER])) == "True"


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "template", "chat_template"],
)
def test_arguments_that_have_fields_of_their_own(name: str) -> None:
    chat = ChatFields(HELLO, template_kwargs=json.dumps({"enable_thinking": True, name: []}))
    assert refused(chat) == ("template_kwargs", f"must not have {name}, which is a field of its own")


NO_OBJECTS = {
    "[]": "is no JSON object, but an array",
    '"a"': "is no JSON object, but a string",
    "3": "is no JSON object, but a number",
    "true": "is no JSON object, but a boolean",
    "null": "is no JSON object, but null",
    "{": "is no JSON object: Expecting property name",
    "{} {}": "is no JSON object: Extra data",
    '{"a": NaN}': "is no JSON object: NaN is no number of JSON",
    '{"a": ' + "9" * 5000 + "}": "is no JSON object: ",
    '{"a":' * 65 + "0" + "}" * 65: "is nested over 64 deep",
    '{"a":' + "[" * 100_000: "is nested over 64 deep",
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "message"), NO_OBJECTS.items(), ids=lambda value: value[:20])
def test_what_is_no_json_object(text: str, message: str) -> None:
    for chat, field in (
        (ChatFields(HELLO, tools=("{}", text)), "tools[1]"),
        (ChatFields(HELLO, documents=(text,)), "documents[0]"),
        (ChatFields(HELLO, template_kwargs=text), "template_kwargs"),
    ):
        found = refused(chat)
        assert found[0] == field
        assert found[1].startswith(message)


def test_what_is_nested_just_deep_enough() -> None:
    text = '{"a":' * 64 + "0" + "}" * 64
    assert text_of("{{ tools[0] | tojson(separators=(',', ':')) }}", ChatFields(HELLO, tools=(text,))) == text


def test_a_template_that_is_none() -> None:
    for template, message in (
        ("{% if %}", "the chat template does not compile: line 1: Expected an expression"),
        ("a\n{{ b", "the chat template does not compile: line 2: "),
        ("{% include 'x' %}", "the chat template refuses this chat: no loader for this environment specified"),
    ):
        field, found = refused(ChatFields(HELLO), template)
        assert field == ""
        assert found.startswith(message)
    with pytest.raises(ChatError) as caught:
        compile_template("{% x %}", "template")
    assert caught.value.field == "template"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() | length }}",
        "{{ namespace.__init__.__globals__ | length }}",
        "{{ messages.append(1) }}",
        "{{ strftime_now.__globals__.keys() }}",
        "{% set n = namespace() %}{% set n.__class__ = 3 %}{{ n }}",
        "{{ raise_exception('no') }}",
        "{{ messages[0].nothing.at_all }}",
        "{{ 'x' * messages }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_what_a_template_cannot_do(template: str) -> None:
    field, message = refused(ChatFields(HELLO), template)
    assert field == ""
    assert message.startswith("the chat template refuses this chat: ")
    assert len(message) < 600


def test_the_size_of_the_text_is_limited() -> None:
    template = "{% for i in range(99999) %}{{ messages[0].content * 3 }}{% endfor %}"
    assert refused(ChatFields(HELLO), template) == ("", f"the rendered chat has over {MAX_PROMPT_CHARS} characters")
    whole = ChatFields((MessageFields("user", "x" * MAX_PROMPT_CHARS),))
    assert len(text_of("{{ messages[0].content }}", whole)) == MAX_PROMPT_CHARS
    assert refused(whole, "{{ messages[0].content }}.")[0] == ""


def test_what_is_no_character_is_refused() -> None:
    chat = ChatFields(HELLO, template_kwargs='{"name": "\\ud800"}')
    assert refused(chat, "{{ name }}") == ("", "the rendered chat holds a lone surrogate, which is no character")
    assert text_of("{{ name | length }}", chat) == "1"
