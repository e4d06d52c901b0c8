"""The client's side of constraints: what is refused by name, and what is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cadenza import SamplingParams, StructuredOutputsParams
from cadenza.calls.convert import params_to_proto
from cadenza.errors import OptionError
from cadenza.v1 import types_pb2
from cadenza_cli.structured import structured_outputs
from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.grammar.wire import spec_from_wire


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, structural_tag, not none"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of .*, not regex, choice"),
        ({"json": "{"}, r"structured_outputs\.json is no JSON"),
        ({"json": {"a": {1, 2}}}, r"structured_outputs\.json cannot be written as JSON"),
        ({"regex": ""}, r"structured_outputs\.regex must be a text that is not empty, not ''"),
        ({"regex": 3}, r"structured_outputs\.regex must be a text"),
        ({"choice": []}, r"structured_outputs\.choice must have at least one entry"),
        ({"choice": "ab"}, r"structured_outputs\.choice must be a list of texts, not 'ab'"),
        ({"choice": ["a", ""]}, r"structured_outputs\.choice must be a text that is not empty"),
        ({"json_object": 1}, r"structured_outputs\.json_object must be True, not 1"),
        ({"regex": "a", "whitespace_pattern": " "}, r"whitespace_pattern needs json or json_object, not regex"),
        ({"choice": ["a"], "disable_any_whitespace": True}, "disable_any_whitespace needs json or json_object"),
        ({"json_object": True, "disable_additional_properties": True}, "disable_additional_properties needs json"),
        ({"json": "{}", "disable_any_whitespace": True, "whitespace_pattern": " "}, "excludes disable_any_whitespace"),
        ({"json": "{}", "start_after_token_ids": [-1]}, "start_after_token_ids must hold token ids"),
        ({"jsons": "{}"}, "structured_outputs has no field 'jsons'; did you mean json?"),
        (3, "structured_outputs must be None, StructuredOutputsParams or a dict, not 3"),
    ],
)
def test_what_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(structured_outputs=fields)


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"json": {"type": "string"}}, GrammarSpec("json_schema", '{"type": "string"}')),
        ({"json": '{"a":1}', "regex": None}, GrammarSpec("json_schema", '{"a":1}')),
        ({"json": True}, GrammarSpec("json_schema", "true")),
        ({"regex": "[ab]+"}, GrammarSpec("regex", "[ab]+")),
        ({"choice": ("yes", "no")}, GrammarSpec("choices", choices=("yes", "no"))),
        ({"grammar": 'start: "a"'}, GrammarSpec("grammar", 'start: "a"')),
        ({"json_object": True, "whitespace_pattern": " ?"}, GrammarSpec("json_object", whitespace_pattern=" ?")),
        (
            {"json": "{}", "disable_any_whitespace": True, "disable_additional_properties": True},
            GrammarSpec("json_schema", "{}", disable_any_whitespace=True, disable_additional_properties=True),
        ),
        (
            {"structural_tag": {"structures": [], "triggers": []}, "start_after_token_ids": [3, 4]},
            GrammarSpec("structural_tag", '{"structures": [], "triggers": []}', start_after_token_ids=(3, 4)),
        ),
    ],
)
def test_what_is_sent(fields: dict[str, Any], spec: GrammarSpec) -> None:
    message = params_to_proto(SamplingParams(structured_outputs=fields))
    assert spec_from_wire(types_pb2.SamplingParams.FromString(message.SerializeToString()).grammar) == spec
    given = StructuredOutputsParams(**{name: value for name, value in fields.items() if value is not None})
    assert params_to_proto(SamplingParams(structured_outputs=given)) == message


def test_nothing_is_sent_without_one() -> None:
    assert not params_to_proto(SamplingParams()).HasField("grammar")
    assert spec_from_wire(types_pb2.GrammarSpec(json_object=False)).kind is None


def test_options_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"type": "integer"}))
    assert structured_outputs(None, None) is None
    assert structured_outputs(str(file), None) == StructuredOutputsParams(json='{"type": "integer"}')
    assert structured_outputs("-", None) == StructuredOutputsParams(json_object=True)
    assert structured_outputs(None, "a+") == StructuredOutputsParams(regex="a+")
    file.write_text("{")
    for schema, regex, message in (
        (str(file), None, "is no JSON"),
        (str(tmp_path / "none"), None, "No such file"),
        (str(file), "a", "not both"),
        (None, "", "option regex: must not be empty"),
    ):
        with pytest.raises(OptionError, match=message):
            structured_outputs(schema, regex)
