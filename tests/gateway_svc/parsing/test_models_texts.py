"""Outputs as models write them beside what their templates show, as public tests have them; streamed equals whole."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gateway_svc.parsing.output import Reading
from gateway_svc.requests.tools import Tool
from gateway_svc.tools.xml_arguments import argument_kinds
from tests.gateway_svc.parsing.test_every_format import formats, tokens_of
from tests.helpers.models.outputs_in_deltas import deltas, message_of, parse, whole

STRING = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": STRING,
        "code": STRING,
        "days": {"type": "integer"},
        "flag": {"type": "boolean"},
        "ratio": {"type": "number"},
        "tags": {"anyOf": [{"type": "array", "items": STRING}, {"type": "object"}]},
        "obj": {"type": "object"},
        "n": {"type": ["integer", "null"]},
    },
}
TOOLS = [Tool("f", None, SCHEMA), Tool("g", None, {"type": "object", "properties": {}})]
KIMI = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
SECTION, CALL, ARGS, END = KIMI
KIMI_END = "<|tool_calls_section_end|>"
V3, V3_CALL, V3_SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
V3_END, V3_CALL_END = "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>"
MARK = "]<]minimax[>["
Calls = list[tuple[str, dict[str, Any]]]
CITY: Calls = [("f", {"city": "a"})]
BOTH: Calls = [*CITY, ("g", {})]


def dsml(*parameters: str) -> str:
    inner = "\n".join(f"<｜DSML｜parameter {each}</｜DSML｜parameter>" for each in parameters)
    return f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n{inner}\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'


def coder(name: str, **arguments: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def tree(*elements: str) -> str:
    inner = "".join(element.replace("<", f"{MARK}<") for element in elements)
    return f'{MARK}<tool_call>\n{MARK}<invoke name="f">{inner}{MARK}</invoke>\n{MARK}</tool_call>'


def harmony(header: str) -> str:
    return f'{header}<|message|>{{"city": "a"}}<|call|>'


TEXTS: list[tuple[str, str, str, Calls]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"city": "a"}}</tool_call>', "", CITY),
    ("hermes", 'Ok.<tool_call>{"name": "f","arguments": {"city":"a"}}</tool_call>', "Ok.", CITY),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"city": "a"}}', "", CITY),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": "{\\"city\\": \\"a\\"}"}\n</tool_call>', "", CITY),
    ("hermes", '<tool_call>\n{"arguments": {"city": "a"}, "name": "f"}\n</tool_call>\n\nDone.', "Done.", CITY),
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"city": "a"}}\n{"name": "g", "arguments": {}}\n</tool_call>',
        "",
        BOTH,
    ),
    ("qwen3_coder", coder("f", city="a") + "\n" + coder("g"), "", BOTH),
    ("qwen3_coder", coder("f", city="a").removeprefix("<tool_call>\n"), "", CITY),
    ("qwen3_coder", coder("f", city="a").removesuffix("\n</tool_call>"), "", CITY),
    ("qwen3_coder", "Ok!" + coder("f", city="a").replace("\n", ""), "Ok!", CITY),
    ("qwen3_coder", coder("f", obj="{'k': True, 'l': None}"), "", [("f", {"obj": {"k": True, "l": None}})]),
    ("qwen3_coder", coder("f", days="3", n="null", flag="False"), "", [("f", {"days": 3, "n": None, "flag": False})]),
    ("qwen3_coder", coder("f", days="no number"), "", [("f", {"days": "no number"})]),
    ("qwen3_coder", coder("f", code='def f():\n    return "<b>"'), "", [("f", {"code": 'def f():\n    return "<b>"'})]),
    ("qwen3_coder", coder("f", city=""), "", [("f", {"city": ""})]),
    ("glm45", "<tool_call>g\n</tool_call>", "", [("g", {})]),
    ("glm45", "<tool_call> g </tool_call>", "", [("g", {})]),
    ("glm45", "<tool_call>f<arg_key>city</arg_key><arg_value>a</arg_value></tool_call>", "", CITY),
    ("glm45", "<tool_call>f\n  <arg_key> city </arg_key>\n  <arg_value>a</arg_value>\n  </tool_call>", "", CITY),
    ("glm45", "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>a</arg_value>", "", CITY),
    (
        "glm45",
        "<tool_call>f<arg_key>days</arg_key><arg_value>3</arg_value></tool_call> So.",
        "So.",
        [("f", {"days": 3})],
    ),
    (
        "glm45",
        "I.\n<tool_call>f<arg_key>city</arg_key><arg_value>a</arg_value></tool_call>\nWait.\n<tool_call>g</tool_call>",
        "I.Wait.",
        BOTH,
    ),
    ("deepseek_v3", f'{V3}{V3_CALL}function{V3_SEP}f\n```json\n{{"city": "a"}}\n```{V3_CALL_END}{V3_END}', "", CITY),
    ("deepseek_v3", f'{V3_CALL}function{V3_SEP}f\n```json\n{{"city": "a"}}\n```{V3_CALL_END}', "", CITY),
    ("deepseek_v3", f'Ok {V3}{V3_CALL}function{V3_SEP}f\n```json\n{{"city": "a"}}\n```{V3_END}', "Ok", CITY),
    (
        "deepseek_v31",
        f'{V3}\n{V3_CALL}f{V3_SEP}\n{{"city": "a"}}\n{V3_CALL_END}\n{V3_CALL}g{V3_SEP}{{}}{V3_CALL_END}{V3_END}',
        "",
        BOTH,
    ),
    ("deepseek_v32", "Sure! " + dsml('name="city" string="true">a'), "Sure!", CITY),
    ("deepseek_v32", dsml('name="city">a'), "", CITY),
    (
        "deepseek_v32",
        dsml('name="city">a', 'name="days" string="false">2', 'name="n">null'),
        "",
        [("f", {"city": "a", "days": 2, "n": None})],
    ),
    ("deepseek_v32", dsml(), "", [("f", {})]),
    ("kimi_k2", f'Ok {SECTION}{CALL}functions.f:0{ARGS}{{"city": "a"}}{END}{KIMI_END}', "Ok", CITY),
    (
        "kimi_k2",
        f'{SECTION}{CALL}functions.f:0 {ARGS}{{"city": "a"}} {END}{CALL}functions.g:1\n{ARGS}{{}}{END}',
        "",
        BOTH,
    ),
    ("kimi_k2", f'{SECTION}{CALL}f:0 {ARGS}{{"city": "a"}}{END}{KIMI_END}', "", CITY),
    ("kimi_k2", f'{SECTION}\n{CALL} functions.f:0 {ARGS} {{\n "city": "a"\n}} {END}\n{KIMI_END} So.', "So.", CITY),
    ("kimi_k2", f'{CALL}functions.f:0{ARGS}{{"city": "a"}}', "", CITY),
    ("mistral", '[TOOL_CALLS] [{"arguments":{"city": "a"}, "name": "f", "id": "abcdefghi"}]', "", CITY),
    ("mistral", '[TOOL_CALLS]f{"city": "a"}[TOOL_CALLS]g{}', "", BOTH),
    ("mistral", 'Ok[TOOL_CALLS]f [ARGS] {"city": "a"}[TOOL_CALLS]g[ARGS]{}', "Ok", BOTH),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"city": "a"}', "", CITY),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"city": "a"}}', "", CITY),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {"city": "a"}}; {"name": "g", "parameters": {}}',
        "",
        BOTH,
    ),
    ("llama3_json", '{"city": "a"}', '{"city":"a"}', []),
    ("pythonic", "[ f( city = 'a' ), g() ]", "", BOTH),
    (
        "pythonic",
        "[f(city='a\\'s \"x\"', days=-2, obj={'k': None})]",
        "",
        [("f", {"city": 'a\'s "x"', "days": -2, "obj": {"k": None}})],
    ),
    ("lfm2", "<|tool_call_start|>[f(city='a'), g()]<|tool_call_end|>Checking.", "Checking.", BOTH),
    ("lfm2", '<|tool_call_start|>[{"name": "f", "arguments": {"city": "a"}}]<|tool_call_end|>', "", CITY),
    ("granite", '<|tool_call|> [{"arguments": {"city": "a"}, "name": "f"}, {"name": "g", "arguments": {}}]', "", BOTH),
    ("firefunction", 'functools[{"name": "f", "arguments": {"city": "a"}}]', "", CITY),
    (
        "apriel",
        '<tool_calls>[\n {"name": "f", "arguments": {"city": "a"}},\n {"name": "g", "arguments": {}}\n]</tool_calls>',
        "",
        BOTH,
    ),
    (
        "minimax",
        '<tool_calls>\n{"name": "f", "arguments": {"city": "a"}}\n{"name": "g", "arguments": {}}\n</tool_calls>',
        "",
        BOTH,
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="f"><parameter name="city">a</parameter></invoke></minimax:tool_call>',
        "",
        CITY,
    ),
    ("minimax_m3", tree("<tags><item>a</item><item>b</item></tags>"), "", [("f", {"tags": ["a", "b"]})]),
    ("minimax_m3", tree("<city>a</city>"), "", CITY),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=f>\n<parameter=city>a</parameter>\n</function>\n</seed:tool_call>",
        "",
        CITY,
    ),
    ("gemma4", '<|tool_call>call:f{city: <|"|>a<|"|>, days: 2}<tool_call|>', "", [("f", {"city": "a", "days": 2})]),
    ("gemma4", 'Ok <|tool_call>call:f{city:<|"|>a<|"|>}<tool_call|><|tool_call>call:g{}<tool_call|>', "Ok", BOTH),
    ("functiongemma", "<start_function_call>call:f{city:<escape>a<escape>}<end_function_call>", "", CITY),
    ("internlm", '<|action_start|><|plugin|>{"name": "f", "parameters": {"city": "a"}}<|action_end|>', "", CITY),
    ("olmo3", '<function_calls>\nf(city="a")\ng()\n</function_calls>', "", BOTH),
    ("longcat", '<longcat_tool_call>{"name": "f", "arguments": {"city": "a"}}</longcat_tool_call>', "", CITY),
    ("apertus", '<|tools_prefix|>[{"f": {"city": "a"}}, {"g": {}}]<|tools_suffix|>', "", BOTH),
    (
        "cohere",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"city": "a"}}]<|END_ACTION|>',
        "",
        CITY,
    ),
    ("openai", harmony("<|channel|>commentary to=functions.f <|constrain|>json"), "", CITY),
    ("openai", harmony("<|channel|>commentary to=functions.f code"), "", CITY),
    ("openai", harmony("<|channel|>analysis to=functions.f<|constrain|>json"), "", CITY),
    ("openai", harmony("<|start|>assistant to=functions.f<|channel|>commentary json"), "", CITY),
    ("openai", harmony(" to=functions.f<|channel|>analysis"), "", CITY),
    (
        "openai",
        harmony("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f<|channel|>analysis"),
        "",
        CITY,
    ),
    ("openai", '<|channel|>final <|constrain|>json<|message|>{"x": 1}', '{"x":1}', []),
    ("openai", "<|channel|>commentary to=assistant<|channel|>final<|message|>Hi", "Hi", []),
    ("functionary_v32", 'all\nOk>>>f\n{"city": "a"}>>>g\n{}', "Ok", BOTH),
    ("nemotron", '<TOOLCALL>[{"name": "f", "arguments": {"city": "a"}}]</TOOLCALL>', "", CITY),
    ("minicpm5", '<function name="f"><param name="city"><![CDATA[a]]></param></function>', "", CITY),
]
THOUGHTS = {"openai": "openai_gptoss"}


def read(tools: str, text: str, style: str, reasoning: str = "none", finish: Any = "stop") -> Any:
    """The message of a text, which comes whole and in many splits."""
    found = formats(tools, reasoning, style)
    tokens = tokens_of([(text, True)], found, style, [3, 1, 7])
    reading = Reading(found, ("f", "g"), skips_special=style == "special", kinds=argument_kinds(TOOLS))
    parts, chance = parse(reading, [whole(tokens, finish)]), random.Random(len(text))
    for _ in range(8):
        sizes, lags = ([chance.randint(0, most) for _ in tokens] for most in (4, 5))
        assert parse(reading, deltas(tokens, sizes, lags, finish)) == parts, text
    return message_of(parts)


@pytest.mark.parametrize("style", ["special", "added", "text"])
@pytest.mark.parametrize(("tools", "text", "content", "calls"), TEXTS)
def test_what_models_write_is_read_whole_and_streamed(tools, text, content, calls, style):
    message = read(tools, text, style, THOUGHTS.get(tools, "none"))
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls
    assert "".join((message.content or "").split()) == content
    read(tools, text, style, THOUGHTS.get(tools, "none"), "length")


@pytest.mark.parametrize(
    ("tools", "reasoning", "text", "thought", "content", "calls"),
    [
        ("minimax_m3", "minimax_m3", "</mm:think>Hi", None, "Hi", []),
        ("minimax_m3", "minimax_m3", "</mm:think>" + tree("<city>a</city>"), None, None, CITY),
        ("gemma4", "gemma4", "<|channel>thought\nHm<channel|>Hi<channel|>", "\nHm", "Hi", []),
        (
            "kimi_k3",
            "kimi_k3",
            "<|open|>think<|sep|>Hm<|open|>response<|sep|>Hi<|close|>response<|sep|>",
            "Hm",
            "Hi",
            [],
        ),
        ("cohere", "cohere", "<|START_THINKING|>Hm<|START_RESPONSE|>Hi<|END_RESPONSE|>", "Hm", "Hi", []),
        ("deepseek_v32", "qwen3", "<think>Hm.\n\n" + dsml('name="city">a'), "Hm.\n\n", None, CITY),
        ("deepseek_v32", "qwen3", "<think>a < b <", "a < b <", None, []),
        ("deepseek_v32", "qwen3", "<think>a <</think>Hi", "a <", "Hi", []),
        ("kimi_k2", "qwen3", f'<think>Hm{CALL}functions.f:0{ARGS}{{"city": "a"}}{CALL}g:1{ARGS}{{}}', "Hm", None, BOTH),
    ],
)
@pytest.mark.parametrize("style", ["added", "text"])
def test_thoughts_that_end_as_they_should_not(tools, reasoning, text, thought, content, calls, style):
    message = read(tools, text, style, reasoning)
    assert (message.thought, message.content) == (thought, content)
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls


def test_two_elements_with_one_name_lose_neither():
    text = tree("<city>a</city>", "<city>b</city>")
    message = read("minimax_m3", text, "text")
    assert (message.content, message.calls) == (text, [])


@pytest.mark.parametrize(("finish", "arguments"), [("length", "{"), ("stop", "{}")])
@pytest.mark.parametrize(
    ("tools", "text"), [("glm45", "<tool_call>f\n  "), ("qwen3_coder", "<tool_call>\n<function=f>")]
)
def test_a_call_that_ends_before_its_arguments_has_them_begun(tools, text, finish, arguments):
    (call,) = read(tools, text, "added", finish=finish).calls
    assert call.arguments == arguments
