"""JSON of a constraint: the whitespace that it may have, sizes that are whole numbers, and what allows nothing."""

from __future__ import annotations

import json
import re

import pytest

from cadenza_common.grammar.child import what_is_wrong
from cadenza_common.grammar.compiling import new_matcher
from cadenza_common.grammar.json_schema import with_whitespace
from cadenza_common.grammar.spec import GrammarSpec
from gateway_svc.fields.constraints import _of_schema

llguidance = pytest.importorskip("llguidance")
TABLE = llguidance.LLTokenizer("byte")
ANY_SCHEMA = json.dumps({"type": "object"})


def num_taken(spec: GrammarSpec, text: str) -> int:
    """How many of a text's bytes the constraint lets through."""
    return int(new_matcher(spec, TABLE).try_consume_tokens(list(text.encode())))


SPECS = [GrammarSpec("json_object"), GrammarSpec("json_schema", ANY_SCHEMA), GrammarSpec("json_schema", "{}")]
VALUE = {"a": [1, 2, {"b": "c\n"}], "d": {}, "e": [], "f": None}
INDENTS = [None, 0, 1, 2, 4, 8, "\t"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("indent", INDENTS)
def test_json_may_have_the_whitespace_that_models_write(spec, indent):
    for separators in (None, (",", ":"), (", ", ": ")):
        text = json.dumps(VALUE, indent=indent, separators=separators)
        assert num_taken(spec, text) == len(text)
        windows = text.replace("\n", "\r\n")
        assert num_taken(spec, windows) == len(windows)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    "text", ["{  ", "{\n\n", "{\n \n", "{\t", "{\n" + " " * 41, '{"a":  ', '{"a": 1\n\n', '{"a"  ']
)
def test_json_has_no_whitespace_without_an_end(spec, text):
    assert num_taken(spec, text) == len(text) - 1


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_request_may_say_what_whitespace_there_is(kind):
    text = "{\n\n \t\r\n" + " " * 99 + '"a"  :  1}'
    given = "" if kind == "json_object" else ANY_SCHEMA
    any_whitespace = GrammarSpec(kind, given, whitespace_pattern=r"[ \t\r\n]+")
    assert num_taken(any_whitespace, text) == len(text)
    assert num_taken(GrammarSpec(kind, given, disable_any_whitespace=True), '{ "a"') == 1
    own = json.dumps({"type": "object", "x-guidance": {"whitespace_pattern": "  "}})
    assert num_taken(GrammarSpec("json_schema", own), "{   ") == 3


def test_tags_have_the_same_whitespace():
    tags = {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f>"]}
    spec = GrammarSpec("structural_tag", json.dumps(tags))
    assert num_taken(spec, 'x  \n\n<f>{\n  "a": 1}</f>  \n\n') == 27
    assert num_taken(spec, "<f>{\n\n") == 5


def test_other_options_of_a_schema_stay():
    assert with_whitespace({"x-guidance": {"coerce_one_of": True}})["x-guidance"]["coerce_one_of"] is True
    assert with_whitespace({"x-guidance": "no object"}) == {"x-guidance": "no object"}


@pytest.mark.parametrize(
    ("schema", "fits", "does_not"),
    [
        ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, '"ab"', '"a"'),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1.0, "maxItems": 2.0}, "[1, 2]", "[1, 2, 3]"),
        ({"type": "object", "properties": {"a": {"type": "string", "maxLength": 1.0}}}, '{"a": "b"}', '{"a": "bb"}'),
    ],
)
def test_a_size_may_be_written_as_3_0(schema, fits, does_not):
    spec = GrammarSpec("json_schema", json.dumps(schema))
    assert what_is_wrong({"kind": "json_schema", "text": spec.text}, TABLE) == ""
    assert num_taken(spec, fits) == len(fits)
    assert num_taken(spec, does_not) < len(does_not)


def test_a_size_that_is_no_integer_is_refused():
    error = what_is_wrong({"kind": "json_schema", "text": '{"type": "string", "minLength": 3.5}'}, TABLE)
    assert "minLength" in error
    assert "3.5" in error


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"$ref": "#"}'),
        ("json_schema", '{"anyOf": [{"$ref": "#"}]}'),
        ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}'),
        ("grammar", "start: a\na: start"),
        ("regex", r"[^\s\S]"),
    ],
)
def test_what_no_text_fits_is_refused_in_words(kind, text):
    error = what_is_wrong({"kind": kind, "text": text}, TABLE)
    assert error == "no text fits: it allows nothing, or refers to itself without an end"


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"type": "array", "uniqueItems": True}, r'Unimplemented keys: \["uniqueItems"\]'),
        ({"type": "string", "pattern": "^a($"}, r"regex parse error: \^a\(\$ \^ error: unclosed group"),
        (
            {"type": "string", "pattern": "^(?!a)b$"},
            "look-around, including look-ahead and look-behind, is not supported",
        ),
    ],
)
def test_errors_of_a_schema_show_no_grammar_around_it(schema, error):
    found = what_is_wrong({"kind": "json_schema", "text": json.dumps(schema)}, TABLE)
    assert re.fullmatch(f"failed to compile JSON schema: .*{error}.*", f"failed to compile JSON schema: {found}")
    assert "%json" not in found
    # As behind a thought: the gateway makes a Lark grammar, and takes its lines off again.
    text = '%llguidance {}\nstart: ("<think>")? answer\nanswer: %json ' + json.dumps(schema)
    found = _of_schema(what_is_wrong({"kind": "grammar", "text": text}, TABLE))
    assert re.fullmatch(f"failed to compile JSON schema: .*{error}.*", found)
    assert "<think>" not in found
    assert "%json" not in found
