"""Forced, strict and single calls in the words of each format: the grammar takes what the format writes."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import llguidance.hf
import pytest
from transformers import AddedToken as HfToken

from cadenza.info import AddedToken, ModelInfo
from cadenza_common.call_formats.catalog import BY_NAME, FORMATS
from cadenza_common.call_formats.thoughts import THOUGHTS, THOUGHTS_BY_NAME
from cadenza_common.call_formats.writing import written_calls, written_thought
from gateway_svc.parsing.formats import Formats, find_formats
from gateway_svc.parsing.output import Reading, read_output
from gateway_svc.parsing.reasoning import Opening
from gateway_svc.requests.tools import Tool, ToolUse
from gateway_svc.tools.grammars import grammar_of
from gateway_svc.tools.xml_arguments import argument_kinds
from tests.helpers.models.outputs_in_deltas import Token, whole
from tests.helpers.models.toy_tokenizers import hf_byte_level

pytestmark = pytest.mark.slow
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": 0, "maximum": 30},
        "e": {"enum": ["x", "y"]},
        "l": {"type": "array", "items": {"type": "string"}},
        "o": {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"]},
    },
    "required": ["a"],
    "additionalProperties": False,
}
GOOD: list[dict[str, Any]] = [
    {"a": "b c"},
    {"a": "é<", "n": 7, "e": "y"},
    {"a": "", "n": 30, "l": ["p", "q"], "o": {"k": True}},
]
WRONG: list[dict[str, Any]] = [{"a": "1234567"}, {"a": "b", "n": 31}, {"a": "b", "e": "z"}, {"n": 1}]
THOUGHT_OF = {"openai": "openai_gptoss", "kimi_k3": "kimi_k3", "cohere": "cohere", "solar": "solar", "muse": "muse"}


@cache
def model(tools: str, reasoning: str) -> tuple[Any, Any, ModelInfo]:
    """A tokenizer with the markers of formats, llguidance's table of it, and the model's description."""
    tokenizer = hf_byte_level()
    texts = [*BY_NAME[tools].markers]
    if reasoning != "none":
        thought = THOUGHTS_BY_NAME[reasoning]
        texts += thought.parts or (thought.open, thought.close, *thought.wrappers)
    tokenizer.add_tokens([HfToken(text, special=False, normalized=False) for text in dict.fromkeys(texts)])
    added = [AddedToken(tokenizer.convert_tokens_to_ids(text), text, False) for text in dict.fromkeys(texts)]
    info = ModelInfo("m", "a", 512, 256, "f", [0], None, True, True, 1, True, b"", "", added)
    return tokenizer, llguidance.hf.from_tokenizer(tokenizer), info


def accepts(tools: str, reasoning: str, grammar: str, text: str, style: str) -> bool:
    tokenizer, table, _ = model(tools, reasoning)
    matcher = llguidance.LLMatcher(table, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
    if style == "added":
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = [each for char in text for each in tokenizer.encode(char, add_special_tokens=False)]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def formats(tools: str, style: str, reasoning: str = "none") -> Formats:
    _, _, info = model(tools, reasoning)
    if style == "text":
        info = ModelInfo("m", "a", 512, 256, "f", [0], None, True, True, 1, True, b"", "", [])
    return find_formats(info, tools, reasoning)  # type: ignore[arg-type]


def written(found: Formats, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a grammar has them: strings of JSON in Python's form too, and nothing that may be left out."""
    text = written_calls(found.way, calls)
    if found.tools == "pythonic":
        text = text.removeprefix("<|python_start|>").removesuffix("<|python_end|>")
    if found.tools in ("pythonic", "lfm2", "olmo3"):
        for value in ("b c", "é<", "", "y", "p", "q", "x", "1234567", "b", "z"):
            text = text.replace(f"'{value}'", json.dumps(value, ensure_ascii=False))
        text = text.replace("'k'", '"k"').replace("True", "true")
    if found.tools == "llama3_json":
        text = text.removeprefix("<|python_tag|>")
    if found.tools == "solar":
        text = text.replace("abcdefgh0", "abcdefgh1")
    return text


@pytest.mark.parametrize("style", ["added", "text"])
@pytest.mark.parametrize("tools", [each.name for each in FORMATS])
def test_forced_calls_are_in_the_formats_own_words_and_fit(tools, style):
    found = formats(tools, style)
    tool, other = Tool("f", None, SCHEMA), Tool("g", None, None)
    grammar = grammar_of(ToolUse((tool, other), "required"), found, None, None)
    reading = Reading(found, ("f", "g"), skips_special=False, kinds=argument_kinds([tool, other]))
    for good in GOOD:
        text = written(found, [("f", good)])
        assert accepts(tools, "none", grammar, text, style), f"{text}\n{grammar}"
        ids = {marker.text: marker.token_id for marker in found.markers if marker.token_id is not None}
        tokens = tokens_of(text, ids)
        (call,) = read_output(reading, whole(tokens), []).calls
        assert (call.name, json.loads(call.arguments)) == ("f", good)
    for wrong in WRONG:
        assert not accepts(tools, "none", grammar, written(found, [("f", wrong)]), style), wrong
    two = written(found, [("f", GOOD[0]), ("f", GOOD[1])])
    assert accepts(tools, "none", grammar, two, style), f"{two}\n{grammar}"
    one = grammar_of(ToolUse((tool, other), "required", is_parallel=False), found, None, None)
    assert not accepts(tools, "none", one, two, style)
    assert accepts(tools, "none", one, written(found, [("f", GOOD[0])]), style)
    assert not accepts(tools, "none", grammar, "Hello", style)


def tokens_of(text: str, ids: dict[str, int]) -> list[Token]:
    import re

    pattern = re.compile("(" + "|".join(map(re.escape, sorted(ids, key=len, reverse=True))) + ")") if ids else None
    parts = pattern.split(text) if pattern else [text]
    return [Token(part, ids.get(part, 7)) for part in parts if part]


@pytest.mark.parametrize("style", ["added", "text"])
@pytest.mark.parametrize("tools", [each.name for each in FORMATS])
def test_strict_calls_stand_between_free_texts(tools, style):
    reasoning = THOUGHT_OF.get(tools, "none")
    found = formats(tools, style, reasoning)
    if reasoning != "none" and style == "text":
        return  # such models have tokens
    use = ToolUse((Tool("f", None, SCHEMA, is_strict=True),), "auto")
    grammar = grammar_of(use, found, None, None)
    assert accepts(tools, reasoning, grammar, "Hello, it is fine.", style) or reasoning != "none", grammar
    text, wrong = written(found, [("f", GOOD[1])]), written(found, [("f", WRONG[1])])
    is_bare = found.way.bare is not None and found.way.is_known
    before = "" if is_bare or reasoning != "none" else "I look.\n"
    assert accepts(tools, reasoning, grammar, before + text, style), f"{before + text}\n{grammar}"
    assert not accepts(tools, reasoning, grammar, before + wrong, style), f"{before + wrong}\n{grammar}"


@pytest.mark.parametrize("reasoning", [each.name for each in THOUGHTS])
def test_forced_calls_stand_behind_a_thought(reasoning):
    tools = {value: key for key, value in THOUGHT_OF.items()}.get(reasoning, "hermes")
    found = formats(tools, "added", reasoning)
    grammar = grammar_of(ToolUse((Tool("f", None, SCHEMA),), "required"), found, Opening.MAYBE, None)
    syntax = THOUGHTS_BY_NAME[reasoning]
    call = written(found, [("f", GOOD[0])])
    thought = written_thought(syntax, "Well.")
    thought = thought.removeprefix(syntax.open) if syntax.always else thought
    assert accepts(tools, reasoning, grammar, thought + call, "added"), f"{thought + call}\n{grammar}"
