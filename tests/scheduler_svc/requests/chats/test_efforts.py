"""Efforts that a template refuses: vllm-project/vllm#54017, QwenLM/Qwen3.8#217."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.requests.chats.fields import ChatError
from scheduler_svc.requests.chats.template import compile_template, render
from tests.helpers.models.chats import chat_of

QWEN = """{%- set effort = reasoning_effort|default('xhigh') %}{%- if effort not in ('xhigh', 'medium', 'low') %}
{{- raise_exception('Unexpected reasoning effort ' ~ effort) }}{%- endif %}{{ effort }}"""
HUNYUAN = """{%- if not reasoning_effort is defined %}{%- set reasoning_effort = 'no_think' %}
{%- elif reasoning_effort not in ['high', 'low', 'no_think'] %}{{- raise_exception('reasoning_effort error') }}
{%- endif %}{{ reasoning_effort }}"""
KIMI = """{%- if thinking_effort is undefined -%}{%- set thinking_effort = 'max' -%}{%- endif -%}
{%- if thinking and thinking_effort not in ['low', 'high', 'max'] -%}{{- raise_exception('Unsupported') -}}{%- endif -%}
{{ thinking_effort if thinking else 'off' }}"""
PLAIN = "Reasoning: {{ reasoning_effort }}"
DEMANDING = QWEN + "{% for tool in tools %}{{ '. ' + tool.function.description }}{% endfor %}"


def shown(template: str, effort: str | None, tools: Any = None, **more: Any) -> str:
    given = {} if effort is None else {"reasoning_effort": effort, "thinking_effort": effort}
    chat = chat_of([{"role": "user", "content": "Hi"}], chat_template_kwargs=given | more, tools=tools)
    return render(compile_template(template), chat, {})


@pytest.mark.parametrize(
    ("template", "efforts"),
    [
        (
            QWEN,
            {"minimal": "low", "low": "low", "medium": "medium", "high": "medium", "xhigh": "xhigh", "max": "xhigh"},
        ),
        (HUNYUAN, {"none": "no_think", "low": "low", "medium": "low", "high": "high", "xhigh": "high", "max": "high"}),
        (KIMI, {"minimal": "low", "medium": "low", "high": "high", "xhigh": "high", "max": "max"}),
        (PLAIN, {each: f"Reasoning: {each}" for each in ("none", "minimal", "high", "huge")}),
    ],
)
def test_the_nearest_effort_that_a_template_knows(template: str, efforts: dict[str, str]) -> None:
    for effort, wanted in efforts.items():
        assert shown(template, effort, thinking=True) == wanted


def test_an_effort_beside_tools_that_a_template_refuses() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert shown(DEMANDING, "high", tools) == "medium. "


@pytest.mark.parametrize(
    "given", [{"reasoning_effort": "high"}, {"reasoning_effort": "high", "thinking_effort": "low"}]
)
def test_an_argument_of_the_templates_own_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(ChatError, match="Unexpected reasoning effort high"):
        shown(QWEN, None, **given)


@pytest.mark.parametrize("effort", ["none", "huge"])
def test_what_no_effort_is_near_to_is_refused(effort: str) -> None:
    with pytest.raises(ChatError, match=f"Unexpected reasoning effort {effort}"):
        shown(QWEN, effort)


def test_another_refusal_is_said_as_it_is() -> None:
    with pytest.raises(ChatError, match="no such chats"):
        shown("{{ raise_exception('no such chats: ' ~ reasoning_effort) }}", "high")
