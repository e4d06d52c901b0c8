"""The format of a model is seen in its chat template and its tokens."""

from __future__ import annotations

import pytest

from cadenza.info import AddedToken, ModelInfo
from gateway_svc.parsing.formats import Formats, find_formats
from gateway_svc.parsing.parts import Role
from tests.helpers.models.chat_templates import HERMES, LLAMA, MISTRAL

CODER = "{% for tool in tools %}{% endfor %}<tool_call>\n<function=f>"
PYTHONIC = "{% if tools %}[func_name1(params_name1=params_value1)]{% endif %}"


def model(template: str, *tokens: str) -> ModelInfo:
    added = [AddedToken(300 + index, text, False) for index, text in enumerate(tokens)]
    return ModelInfo("m", "a", 512, 256, "f", [0], None, True, True, 1, True, b"", template, added)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (HERMES, "hermes"),
        (MISTRAL, "mistral"),
        (LLAMA, "llama3_json"),
        (PYTHONIC, "pythonic"),
        (CODER, "qwen3_coder"),
        ("{{ messages }}", None),
        ("", None),
    ],
)
def test_the_template_shows_how_tools_are_called(template, found):
    assert find_formats(model(template)).tools == found
    assert find_formats(model(template), "none", "none") == Formats()
    assert find_formats(model(template), "mistral").tools == "mistral"


def test_a_thought_is_known_by_the_template_or_the_tokens():
    assert find_formats(model(HERMES)).reasoning is None
    assert find_formats(model("{{ '<think>' }}")).reasoning == "qwen3"
    assert find_formats(model(HERMES, "[THINK]", "[/THINK]")).reasoning == "mistral"
    found = find_formats(model(HERMES, "<think>", "</think>", "<tool_call>"))
    assert found.reasoning == "qwen3"
    assert not found.always_thinks
    ids = [found.marker(role).token_id for role in (Role.THOUGHT, Role.THOUGHT_END, Role.CALL, Role.CALL_END)]
    assert ids == [300, 301, 302, None]
    assert find_formats(model(HERMES), reasoning="deepseek_r1").always_thinks
