"""Structural tags: what the grammar of each form allows, and what is not supported is refused by name."""

from __future__ import annotations

import json
from functools import cache

import llguidance
import llguidance.hf
import pytest

from cadenza_common.grammar.compiling import GrammarError, new_matcher
from cadenza_common.grammar.spec import GrammarSpec
from tests.helpers.models.tool_models import mistral_tokenizer

ONE_TO_NINE = {"type": "integer", "minimum": 1, "maximum": 9}
TAG = {"begin": "<f=a>", "schema": ONE_TO_NINE, "end": "</f>"}
OTHER = {"begin": "<f=b>", "schema": {"enum": ["x"]}, "end": ""}
NEW = {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": ONE_TO_NINE}, "end": "</f>"}


@cache
def table():
    return llguidance.hf.from_tokenizer(mistral_tokenizer())


def accepts(content, text):
    """Whether a text, with the markers of Mistral as special tokens, is allowed as a whole."""
    matcher = new_matcher(GrammarSpec("structural_tag", json.dumps(content)), table())
    ids = mistral_tokenizer().encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def new(*tags, triggers=("<f",), **more):
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags, **more}}


@pytest.mark.parametrize(
    "content",
    [
        {"structures": [TAG, OTHER], "triggers": ["<f"]},
        {"type": "structural_tag", "structures": [TAG | {"schema": json.dumps(ONE_TO_NINE)}, OTHER],
         "triggers": ["<f=a>", "<f"]},
        new(NEW, {"type": "tag", "begin": "<f=b>", "content": {"type": "const_string", "value": '"x"'}, "end": ""}),
        new(NEW, {"begin": "<f=b>", "content": {"type": "json_schema", "json_schema": {"enum": ["x"]}}, "end": ""},
            at_least_one=False, stop_after_first=False, excludes=[]),
    ],
)  # fmt: skip
def test_a_part_is_constrained_behind_its_trigger(content):
    for good in ("", "any text <g>", "<f=a>7</f>", 'so <f=a>1</f> and <f=b>"x" or <f=a>2</f>.\n', "a < f"):
        assert accepts(content, good), good
    for bad in ("<f", "<f=a>", "<f=a>0</f>", "<f=a>7</g>", "<f=c>7</f>", "so <f=b>x", "<f=a>7</f><f"):
        assert not accepts(content, bad), bad


def test_a_trigger_in_angle_brackets_is_text_unless_it_is_a_special_token():
    text = {"structures": [{"begin": "<f>", "schema": ONE_TO_NINE, "end": "</f>"}], "triggers": ["<f>"]}
    assert accepts(text, "so <f>7</f>")
    assert not accepts(text, "so <f>x</f>")
    for trigger in ("[TOOL_CALLS]", "[TOOL"):
        special = {
            "structures": [{"begin": "[TOOL_CALLS]", "schema": ONE_TO_NINE, "end": "[ARGS]"}],
            "triggers": [trigger],
        }
        assert accepts(special, "so [TOOL_CALLS]7[ARGS] and [TOOL_CALLS]8[ARGS]")
        assert not accepts(special, "so [TOOL_CALLS]x[ARGS]")
        assert not accepts(special, "so [TOOL_CALLS]7")


def test_a_tag_may_have_any_text_up_to_its_end():
    for end in ("</f>", "[ARGS]"):
        content = new({"begin": "<f>", "content": {"type": "any_text"}, "end": end}, NEW)
        assert accepts(content, f"<f>what\nis <f=a> here{end} <f=a>7</f>")
        assert not accepts(content, "<f>what is here")
        assert not accepts(content, f"<f>what{end} <f=a>0</f>")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "structures"),
        ({"structures": [], "triggers": ["<"]}, "no structures"),
        ({"structures": [TAG], "triggers": [""]}, "triggers"),
        ({"structures": [TAG], "triggers": [5]}, "triggers"),
        ({"structures": [TAG], "triggers": ["<g"]}, "no trigger is the beginning"),
        ({"structures": [TAG | {"schema": 5}], "triggers": ["<f"]}, "schema"),
        ({"structures": [TAG | {"schema": "start: /a/"}], "triggers": ["<f"]}, "schema"),
        ({"structures": [TAG | {"schema": {"type": "banana"}}], "triggers": ["<f"]}, "banana"),
        ({"structures": [TAG | {"ends": "x"}], "triggers": ["<f"]}, "'ends'"),
        ({"structures": [TAG], "triggers": ["<f"], "at_least_one": True}, "'at_least_one'"),
        ({"format": {"type": "sequence", "elements": []}}, "triggered_tags"),
        ({"format": "triggered_tags"}, "triggered_tags"),
        (new(NEW) | {"triggers": ["<f"]}, "'triggers'"),
        (new(), "no tags"),
        (new(NEW, at_least_one=True), "at_least_one"),
        (new(NEW, stop_after_first=True), "stop_after_first"),
        (new(NEW, other=1), "'other'"),
        (new(NEW | {"schema": {}}), "'schema'"),
        (new(NEW | {"end": ["</f>", "</g>"]}), "begin and end"),
        (new(NEW | {"content": {"type": "regex", "pattern": "a"}}), "'regex'"),
        (new(NEW | {"content": {"type": "any_text"}, "end": ""}), "no end"),
        (new(NEW | {"content": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}), "'style'"),
    ],
)
def test_what_is_wrong_or_not_supported_is_named(content, said):
    with pytest.raises(GrammarError, match=said):
        new_matcher(GrammarSpec("structural_tag", json.dumps(content)), table())
