"""What constrains an answer with thoughts and tools, and what forced grammars allow, which parsers must read."""

from __future__ import annotations

import json
from functools import cache

import jsonschema
import llguidance.hf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.info import AddedToken, ModelInfo
from cadenza.prompts import Prompt
from cadenza.sampling_params import SamplingParams
from gateway_svc.http.errors import ApiError
from gateway_svc.parsing.formats import Formats, find_formats
from gateway_svc.parsing.output import Reading, read_output
from gateway_svc.requests.request import GatewayRequest
from gateway_svc.requests.tools import Tool, ToolUse
from gateway_svc.tools.grammars import grammar_of
from gateway_svc.tools.preparing import prepare
from gateway_svc.tools.xml_arguments import argument_kinds
from tests.helpers.models.outputs_in_deltas import Token, whole
from tests.helpers.models.tool_models import MARKERS, hermes_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@cache
def table():
    return llguidance.hf.from_tokenizer(hermes_tokenizer())


def formats(style: str, reasoning: str = "qwen3") -> Formats:
    tokens = [AddedToken(hermes_tokenizer().convert_tokens_to_ids(text), text, False) for text in MARKERS]
    added = tokens if style == "added" else []
    info = ModelInfo("m", "a", 512, 256, "float32", [0], None, True, True, 1, True, b"", "", added)
    return find_formats(info, "hermes", reasoning)  # type: ignore[arg-type]


class Caller:
    """The scheduler's tokenizer."""

    async def tokenize(self, prompt):
        return hermes_tokenizer().encode(prompt.text, add_special_tokens=False)

    async def detokenize(self, ids, *, skip_special_tokens):
        return hermes_tokenizer().decode(ids, skip_special_tokens=skip_special_tokens)


def asked(prompt: Prompt, params: SamplingParams, use: ToolUse | None = None, field: str = "structured_outputs"):
    """A request, read; field: the one that has its constraint."""
    return GatewayRequest(id="a", prompts=[prompt], params=params, use=use or ToolUse(), constrained_by=field)


def accepts(grammar: str, text: str, style: str) -> bool:
    """Whether a grammar of Lark allows a text, whose markers are tokens or plain text."""
    matcher = llguidance.LLMatcher(table(), llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokenizer = hermes_tokenizer()
    if style == "added":
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = [each for char in text for each in tokenizer.encode(char, add_special_tokens=False)]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


CONSTRAINTS = {
    "regex": ({"regex": "a/b[\n0-9]{2}"}, "a/b\n1", "a/b"),
    "choice": ({"choice": ['x"y', "z"]}, 'x"y', "x"),
    "grammar": ({"grammar": 'start: "start" B | start2\nB: /start [0-9]/ // start\nstart2: "2"'}, "startstart 7", "2 "),
    "header": ({"grammar": '%llguidance {"no_forcing": true}\nstart: "q" NUM\nNUM: /[0-9]/'}, "q1", "1"),
    "json": ({"json": SCHEMA}, '{\n"a": 1}', "{}"),
    "compact": ({"json": SCHEMA, "disable_any_whitespace": True}, '{"a":1}', '{\n"a": 1}'),
    "json_object": ({"json_object": True}, '{"b": []}', "[]"),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("style", ["added", "plain"])
async def test_a_model_that_may_think_thinks_before_what_is_constrained(name, style):
    given, good, bad = CONSTRAINTS[name]
    params = SamplingParams(structured_outputs=given)
    prepared = await prepare(Caller(), asked(Prompt(text="user\nHi"), params), formats(style))  # type: ignore[arg-type]
    grammar = prepared.params.structured_outputs.grammar
    for before in ("", "<think>Well, start 1.</think>", "<think></think>\n\n"):
        assert accepts(grammar, before + good, style), before
        assert not accepts(grammar, before + bad, style), before
        if before:
            assert not accepts(grammar, before, style), "a thought alone is no answer"


@pytest.mark.parametrize("name", CONSTRAINTS)
async def test_a_constraint_begins_behind_a_thought_that_is_open(name):
    given, good, bad = CONSTRAINTS[name]
    end = hermes_tokenizer().convert_tokens_to_ids("</think>")
    for style in ("added", "plain"):
        params = SamplingParams(structured_outputs=given)
        prepared = await prepare(Caller(), asked(Prompt(text="Hi<think>\n"), params), formats(style))  # type: ignore[arg-type]
        found = prepared.params.structured_outputs
        if found.start_after_token_ids:
            assert (found.start_after_token_ids, style) == ([end], "added")
            assert (found.regex, found.choice) == (params.structured_outputs.regex, params.structured_outputs.choice)
        else:
            assert accepts(found.grammar, f"Well.</think>\n{good}", style)
            assert not accepts(found.grammar, f"Well.</think>{bad}", style)
            assert not accepts(found.grammar, good, style)


async def test_what_cannot_begin_behind_a_thought_is_refused_or_begins_at_once():
    gbnf = {"grammar": 'root ::= "a"'}
    params = SamplingParams(structured_outputs=gbnf)
    with pytest.raises(ApiError) as refused:
        await prepare(Caller(), asked(Prompt(text="<think>"), params), formats("plain"))  # type: ignore[arg-type]
    assert (refused.value.status, refused.value.param) == (400, "structured_outputs")
    for text, style in (("Hi", "plain"), ("<think>\n\n</think>\n\n", "added")):
        prepared = await prepare(Caller(), asked(Prompt(text=text), params), formats(style))  # type: ignore[arg-type]
        assert prepared.params.structured_outputs == params.structured_outputs


TOOL = Tool("get_time", None, {"type": "object", "properties": {}})


@pytest.mark.parametrize(
    ("mode", "field", "value", "is_refused"),
    [
        ("required", "structured_outputs", {"json": SCHEMA}, True),
        ("required", "structured_outputs", {"regex": "a"}, True),
        ("auto", "structured_outputs", {"regex": "a"}, True),
        ("auto", "structured_outputs", {"json": SCHEMA}, False),
        ("required", "response_format", {"type": "json_object"}, False),
        ("auto", "response_format", {"type": "json_object"}, False),
    ],
)
async def test_a_constraint_beside_tools_is_honoured_or_refused_by_name(mode, field, value, is_refused):
    constraint = value if field == "structured_outputs" else {"json_object": True}
    params = SamplingParams(structured_outputs=constraint)
    use = ToolUse((TOOL,), mode)
    work = prepare(Caller(), asked(Prompt(text="Hi"), params, use, field), formats("added", "none"))  # type: ignore[arg-type]
    if is_refused:
        with pytest.raises(ApiError) as refused:
            await work
        assert (refused.value.status, refused.value.param) == (400, field)
        return
    grammar = (await work).params.structured_outputs.grammar
    assert accepts(grammar, '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>', "added")
    assert accepts(grammar, '{"a": 1}', "added") == (mode == "auto")


NAMES = ("get-weather", "a.b", "2nd")
PROPERTIES = ("from", "user-id", "größe")


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_a_forced_call_in_pythons_form_may_be_is_what_is_read(data):
    """Calls that a random model writes under the grammar: the name is the tool's, and the values are the JSON's."""
    value = {"anyOf": [{"type": "string", "maxLength": 6}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}]}
    schema = {"type": "object", "properties": dict.fromkeys(PROPERTIES, value), "required": ["from"]}
    use = ToolUse(tuple(Tool(name, None, schema) for name in NAMES), "required", is_parallel=False)
    pythonic = Formats(tools="pythonic")
    grammar = llguidance.LLMatcher.grammar_from_lark(grammar_of(use, pythonic, None, None))
    matcher = llguidance.LLMatcher(table(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = []
    while not matcher.is_stopped() and len(ids) < 400:
        mask = matcher.compute_bitmask()
        allowed = [each for each in range(table().vocab_size) if mask[each // 8] >> each % 8 & 1]
        escapes = [
            each for each in allowed if hermes_tokenizer().decode([each]) in ("\\", "/", "u", '"', ")", "e", "9")
        ]
        ids.append(
            data.draw(st.sampled_from(escapes or allowed) if data.draw(st.booleans()) else st.sampled_from(allowed))
        )
        assert matcher.try_consume_tokens(ids[-1:]) == 1
    eos = hermes_tokenizer().eos_token_id
    text = hermes_tokenizer().decode([each for each in ids if each != eos], skip_special_tokens=False)
    if not matcher.is_accepting() or "\ufffd" in text:
        return
    (call,) = read_output(Reading(pythonic, NAMES), whole([Token(text)]), []).calls
    assert text.startswith(f"[{call.name}(")
    values = json.loads(call.arguments)
    expected, rest = {}, text[len(call.name) + 2 : -2]
    while rest:
        key, _, rest = rest.partition("=")
        expected[key], end = json.JSONDecoder().raw_decode(rest)
        rest = rest[end:].removeprefix(", ")
    assert values == expected


CODER_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["a\n", "b<"]},
        "count": {"$ref": "#/$defs/small", "description": "x"},
        "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "names": {"type": "array", "items": {"enum": ["</parameter>", "x"]}, "maxItems": 2},
        "maybe": {"type": ["string", "null"], "title": "Maybe"},
    },
    "required": ["text", "count"],
    "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 30}},
}


def coder(style: str = "added") -> Formats:
    found = formats(style, "none")
    return Formats("qwen3_coder", None, found.tool_markers, ())


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_what_a_forced_call_of_qwen_coder_may_be_is_read_and_fits_its_schema(data):
    """Calls that a random model writes under the grammar."""
    tool = Tool("f", None, CODER_SCHEMA)
    use = ToolUse((tool,), "required", is_parallel=False)
    grammar = llguidance.LLMatcher.grammar_from_lark(grammar_of(use, coder(), None, None))
    matcher = llguidance.LLMatcher(table(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = []
    while not matcher.is_stopped() and len(ids) < 700:
        mask = matcher.compute_bitmask()
        allowed = [each for each in range(table().vocab_size) if mask[each // 8] >> each % 8 & 1]
        ending = [each for each in allowed if hermes_tokenizer().decode([each]) in ("\n", "<", "/", "]", '"')]
        likely = ending if ending and data.draw(st.booleans()) else allowed
        ids.append(data.draw(st.sampled_from(likely)))
        assert matcher.try_consume_tokens(ids[-1:]) == 1
    if not matcher.is_accepting():
        return
    tokens = [Token(hermes_tokenizer().decode([each], skip_special_tokens=False), each) for each in ids]
    if any("\ufffd" in token.text for token in tokens) or hermes_tokenizer().eos_token_id in ids[:-1]:
        return
    tokens = [token for token in tokens if token.token_id != hermes_tokenizer().eos_token_id]
    reading = Reading(coder(), ("f",), kinds=argument_kinds([tool]))
    (call,) = read_output(reading, whole(tokens), []).calls
    jsonschema.validate(json.loads(call.arguments), CODER_SCHEMA)


def test_forced_calls_of_qwen_coder():
    use = ToolUse((Tool("f", None, CODER_SCHEMA), Tool("g", None, None)), "required")
    grammar = grammar_of(use, coder(), None, None)
    good = "<tool_call>\n<function=f>\n<parameter=text>\na\nb\n</parameter>\n<parameter=count>\n7\n</parameter>\n"
    end = "</function>\n</tool_call>"
    free = "<tool_call>\n<function=g>\n<parameter=x y>\n1\n</parameter>\n"
    assert accepts(grammar, good + end, "added")
    assert accepts(grammar, f"{good}{end}\n{good}<parameter=maybe>\nnull\n</parameter>\n{end}", "added")
    assert accepts(grammar, free.replace("x y", "x") + end, "added")
    for wrong in (
        good.replace("a\nb", "123456") + end,
        good.replace("7", "31") + end,
        good.replace("7", "7</parameter>") + end,
        good.replace("count", "size") + end,
        free + end,
        f"so {good}{end}",
    ):
        assert not accepts(grammar, wrong, "added"), wrong
    auto = ToolUse((Tool("f", None, CODER_SCHEMA, is_strict=True),), "auto")
    for style in ("added", "plain"):
        grammar = grammar_of(auto, coder(style), None, None)
        assert accepts(grammar, f"so {good}{end} and", style)
        assert not accepts(grammar, f"so {good.replace('7', '31')}{end}", style)


TREE = {
    "type": "object",
    "properties": {
        "size": {"type": "integer"},
        "children": {"type": "array", "items": {"$ref": "#"}},
        "first": {"$ref": "#/properties/size"},
        "same": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["children"],
    "additionalProperties": False,
    "$defs": {"node": {"type": "object", "properties": {"of": {"$ref": "#/properties/size"}}, "required": ["of"]}},
}
"""A schema that refers to itself, as a whole and in parts."""


@pytest.mark.parametrize("tools", ["pythonic", "qwen3_coder"])
def test_references_are_to_the_whole_schema_where_arguments_are_written_one_by_one(tools):
    tool = Tool("f", None, TREE)
    found = coder() if tools == "qwen3_coder" else Formats("pythonic")
    grammar = grammar_of(ToolUse((tool,), "required", is_parallel=False), found, None, None)

    def call(**arguments):
        values = {name: json.dumps(value) for name, value in arguments.items()}
        if tools == "pythonic":
            return f"[f({', '.join(f'{name}={value}' for name, value in values.items())})]"
        parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
        return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"

    leaf = {"size": 1, "children": []}
    for good in ({"children": [leaf, {"children": [leaf]}]}, {"children": [], "same": {"of": 3}}):
        jsonschema.validate(good, TREE)
        assert accepts(grammar, call(**good), "added")
    for wrong in ({"children": [[]]}, {"children": [{"size": 1}]}, {"children": [], "same": {"of": "x"}}):
        assert not jsonschema.Draft202012Validator(TREE).is_valid(wrong)
        assert not accepts(grammar, call(**wrong), "added")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string", "pattern": r"^(?=a)"}, "bare text"),
        ({"type": "string", "enum": ["</parameter>"]}, "values"),
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "string", "pattern": "a"}]}, "bare text"),
        (False, "nothing"),
        ({"$ref": "#/$defs/none"}, "nothing"),
    ],
)
def test_arguments_that_bare_text_cannot_keep_to_are_refused_by_name(schema, said):
    tool = Tool("f", None, {"type": "object", "properties": {"a": {"type": "integer"}, "b": schema}})
    with pytest.raises(ApiError, match=said) as refused:
        grammar_of(ToolUse((tool,), "required"), coder(), None, None)
    assert refused.value.param == "tools"
    assert "'b'" in refused.value.message
