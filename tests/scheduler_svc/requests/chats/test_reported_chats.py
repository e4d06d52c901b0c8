"""Chats of public bug reports: what agents send is shown by templates that refuse it as it comes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from scheduler_svc.requests.chats.fields import ChatError
from scheduler_svc.requests.chats.template import compile_template, render
from tests.helpers.models.chat_templates import USER
from tests.helpers.models.chats import chat_of
from tests.scheduler_svc.requests.chats.test_forms import changes, text_of

pytestmark = pytest.mark.slow

ROUNDS = (
    "{% for m in messages %}{% if m.role == 'user' and loop.previtem is defined and loop.previtem.role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}] {{ m.content }}{% endfor %}"
)
"""As Mistral's and Gemma's: turns alternate."""
IDS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    "{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}{% else %}"
    "{{ m.tool_call_id }} {{ m.content }}{% endfor %};{% endfor %}{{ tools | tojson if tools }}"
)
"""As Mistral Nemo's."""
ONE_THOUGHT = (
    "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('not both') }}"
    "{% endif %}{{ m.thinking }}|{{ m.content }}|{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}{{ tools | tojson if tools }}"
)
"""As gpt-oss's."""


def turn(call_id: str, **more: Any) -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    result = {"role": "tool", "tool_call_id": call_id, "content": "sunny"}
    return [USER, {"role": "assistant", "tool_calls": [call], **more}, result]


def test_turns_of_the_user_that_follow_each_other_are_one_where_turns_alternate() -> None:
    assert changes(ROUNDS)["merges_turns"]
    chat = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    again = [*chat, {"role": "assistant", "content": "yes"}, *chat]
    assert text_of(ROUNDS, again) == "[user] one\n\ntwo[assistant] yes[user] one\n\ntwo"
    assert text_of("{% for m in messages %}[{{ m.content }}]{% endfor %}", chat) == "[one][two]"
    with_system = [{"role": "system", "content": "be kind"}, *again, {"role": "developer", "content": "now"}]
    assert text_of(ROUNDS, with_system).endswith("[user] one\n\ntwo[system] now")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("call_id", ["call_862cd66434a849ae9db1e94c", "toolu_01", "functions.f:0", "1"])
def test_ids_of_other_servers_where_nine_letters_and_digits_are_demanded(call_id: str) -> None:
    assert changes(IDS)["short_ids"]
    text = text_of(IDS, turn(call_id))
    found = re.search(r"([0-9a-f]{9}) f .*;([0-9a-f]{9}) sunny;", text)
    assert found is not None
    assert found.group(1) == found.group(2)
    assert text == text_of(IDS, turn(call_id)), "the prefix is the same in each request"
    assert "abcdefgh1 f" in text_of(IDS, turn("abcdefgh1"))
    assert call_id in text_of(IDS.replace("!= 9", "< 1"), turn(call_id))


def test_text_beside_a_thought_and_calls_is_kept_where_only_one_is_shown() -> None:
    assert changes(ONE_THOUGHT)["joins_thought"]
    text = text_of(ONE_THOUGHT, turn("1", content="I look.", reasoning_content="Hm."))
    assert "Hm.\n\nI look.|" in text
    assert '{"a": 1}' in text
    assert "|I look.|" in text_of(ONE_THOUGHT, turn("1", content="I look."))
    alone = [USER, {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}, USER]
    assert "Hm.|I look.|;" in text_of(ONE_THOUGHT, alone)


TOOL_TEMPLATES = {
    "{% for t in tools %}{{ t.function.name + ': ' + t.function.description }};{% endfor %}": "f: ;",
    "{% for t in tools %}{% for p in t.function.parameters.properties.values() %}{{ p.description + '.' }}{% endfor %}"
    "{{ t.function.name }}{% endfor %}": "f",
    "{% for t in tools %}{% for p in t.function.parameters.properties.values() %}"
    "{% if p.type is defined %}{{ '' + p.type }}{% else %}{{ p.anyOf | map(attribute='type') | join('|') }}{% endif %}"
    "{% endfor %}{% endfor %}": "string|null",
}


@pytest.mark.parametrize("template", TOOL_TEMPLATES)
@pytest.mark.parametrize(
    "parameters", [None, {}, {"type": "object"}, {"properties": {"a": {"type": ["string", "null"]}}}]
)
def test_tools_without_what_templates_read(template: str, parameters: dict[str, Any] | None) -> None:
    """Of gpt-oss, Hermes, Command R and others (https://github.com/jundot/omlx/issues/1876)."""
    function = {"name": "f"} if parameters is None else {"name": "f", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    text = render(compile_template(template), chat_of([USER], tools=tools), {})
    expected = TOOL_TEMPLATES[template]
    if not (parameters or {}).get("properties"):
        assert text == ("" if "|" in expected else expected)
    else:
        assert text == (expected if ";" in expected or "|" in expected else ".f")


def test_tools_are_as_they_came_where_the_template_shows_them_and_errors_are_the_first_ones() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": ["string"]}}}}}
    text = render(compile_template("{{ tools | tojson }}"), chat_of([USER], tools=[tool]), {})
    assert json.loads(text) == [tool]
    with pytest.raises(ChatError, match="never"):
        render(compile_template("{{ raise_exception('never') }}"), chat_of([USER], tools=[tool]), {})
