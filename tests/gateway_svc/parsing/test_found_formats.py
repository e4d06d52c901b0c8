"""The format of a model is what reads the calls that its chat template shows; what none reads is said to be none."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gateway_svc.parsing import formats as formats_module
from gateway_svc.parsing.formats import Formats, KnownFormats, find_formats, option_error
from gateway_svc.parsing.parts import Role
from tests.helpers.models.chat_templates import HERMES, LLAMA, MISTRAL
from tests.helpers.models.shown_models import shown_model

HEAD = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
)
TAIL = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def template(call: str, before: str = "", behind: str = "") -> str:
    """A template that shows each call so."""
    calls = f"{{% for c in m.tool_calls or [] %}}{{% set f = c.function %}}{call}{{% endfor %}}"
    return f"{HEAD}{{% if m.tool_calls %}}{before}{calls}{behind}{{% endif %}}{TAIL}"


ARGUMENTS = "{% for k, v in f.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
CODER = template(
    f"<tool_call>\n<function={{{{ f.name }}}}>\n{ARGUMENTS}<parameter={{{{ k }}}}>\n{VALUE}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>"
)
PYTHONIC = template(
    f"{{{{ f.name }}}}({ARGUMENTS}{{{{ k }}}}={{{{ v | tojson }}}}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
    "{% if not loop.last %}, {% endif %}",
    "[",
    "]",
)
UNKNOWN = template("<call>{{ f.name }}|{{ f.arguments | tojson }}</call>")
NEARLY = template('<tool_call>{"tool": "{{ f.name }}", "with": {{ f.arguments | tojson }}}</tool_call>')
THINKS = HEAD + "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}" + TAIL


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        (HERMES, "hermes"),
        (MISTRAL, "mistral"),
        (LLAMA, "llama3_json"),
        (PYTHONIC, "pythonic"),
        (CODER, "qwen3_coder"),
        (UNKNOWN, None),
        (NEARLY, None),
        ("{{ messages }}", None),
        ("", None),
    ],
)
def test_the_template_shows_how_tools_are_called(shown, found):
    info = shown_model(shown)
    assert find_formats(info).tools == found
    assert find_formats(info, "none", "none") == Formats()
    assert find_formats(info, "mistral").tools == "mistral"
    wrong = option_error(info, "mistral")
    is_shown = found is not None or shown in (UNKNOWN, NEARLY)
    assert (wrong is not None) == (is_shown and found != "mistral")
    if wrong and found:
        assert "--tool-call-parser mistral" in wrong
        assert found in wrong


def test_a_thought_is_known_by_what_the_template_shows_and_by_its_text_and_tokens():
    plain = shown_model(HERMES)
    assert find_formats(plain).reasoning is None
    assert find_formats(shown_model(THINKS)).reasoning == "mistral"
    assert find_formats(shown_model("{{ messages[0].content }}{{ '<think>' }}")).reasoning == "qwen3"
    assert find_formats(shown_model(HERMES, "[THINK]", "[/THINK]")).reasoning == "mistral"
    found = find_formats(shown_model(HERMES, "<think>", "</think>", "<tool_call>"))
    assert found.reasoning == "qwen3"
    assert not found.always_thinks
    ids = [found.marker(role).token_id for role in (Role.THOUGHT, Role.THOUGHT_END, Role.CALL, Role.CALL_END)]
    assert ids == [300, 301, 302, None]
    assert find_formats(plain, reasoning="deepseek_r1").always_thinks


def test_a_template_that_shows_no_calls_is_given_them_as_text_if_it_says_which():
    shown = HEAD.replace("{% for m", "List of tools: {% for m") + TAIL
    info = shown_model(shown)
    assert find_formats(info).tools == "lfm2"
    assert info.chat_examples is not None
    assert "<|tool_call_start|>[qmtool(" in info.chat_examples.call
    assert find_formats(shown_model(HEAD + TAIL)).tools is None


def test_tools_by_their_old_names_are_shown():
    body = "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %} functools[{\"name\": "
    body += '"{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}]{% endfor %}{% endfor %}'
    head = "{% if functions is not defined %}{{ raise_exception('no') }}{% endif %}{{ functions }}{{ datetime }}"
    assert find_formats(shown_model(head + body)).tools == "firefunction"


def test_names_that_stand_in_ids_alone_are_shown():
    """As Kimi K2's own template has them."""
    call = "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>"
    shown = template(call, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    info = shown_model(shown.replace("<{{ m.role }}>", "<{{ m.role }} {{ m.tool_call_id }}>"))
    assert find_formats(info).tools == "kimi_k2"
    assert info.chat_examples is not None
    assert info.chat_examples.calls.count("functions.qmother:1") == 2, "the result's id follows"


PROSE = (
    "Text <think>x</think>, [THINK], <|channel|>analysis<|message|>, <tool_call>[], [TOOL_CALLS], functools[ <|end|> "
)


@pytest.mark.parametrize("before", [f"{{# {PROSE} #}}", PROSE, f"{{{{- 'You are good. {PROSE}' }}}}"])
@pytest.mark.parametrize(("shown", "tools"), [(HERMES, "hermes"), (LLAMA, "llama3_json"), (CODER, "qwen3_coder")])
def test_markers_in_prose_and_comments_show_no_format(shown, tools, before):
    plain, found = find_formats(shown_model(shown)), find_formats(shown_model(before + shown + "\n  "))
    assert (found.tools, found.reasoning) == (plain.tools, plain.reasoning) == (tools, None)


def test_a_closing_marker_at_the_end_of_a_prompt_is_not_enough():
    """As of Phi's turns, which end with <|end|>, as thoughts of harmony do."""
    assert find_formats(shown_model(HEAD + "<|end|>{% endfor %}")).reasoning is None
    assert find_formats(shown_model(HEAD + TAIL + "{{ '<think></think>' }}")).reasoning == "qwen3"


async def test_formats_are_found_once_and_not_on_the_event_loop(monkeypatch):
    info, threads = shown_model(HERMES), []

    def found(*arguments):
        threads.append(threading.get_ident())
        return find_formats(*arguments)

    monkeypatch.setattr(formats_module, "find_formats", found)
    known = KnownFormats()
    one, other = await asyncio.gather(known.of(info), known.of(info))
    assert one == other == await known.of(info) == find_formats(info)
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
