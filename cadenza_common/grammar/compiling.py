"""Compiles constraints with llguidance, under limits that it counts.

The limits are the same in every process, so that whether a constraint is refused follows from the constraint alone.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from cadenza_common.grammar.closing import closed
from cadenza_common.grammar.gbnf import as_lark
from cadenza_common.grammar.json_schema import whole_sizes, with_whitespace
from cadenza_common.grammar.readable import readable
from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.grammar.tags import grammar_of_tags

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 5_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""Of llguidance's ParserLimits: 5,000,000 units of lexer fuel are some 100 ms, 50,000 items 3 ms."""
_OBJECT = '{"type": "object"}'
_MAX_MESSAGE = 500
_OF_SCHEMA = "failed to compile JSON schema"
_LISTING = re.compile(r"\n\s*1 \| ")
"""Where a grammar is shown behind an error."""
_NOT_VERBOSE = "<non-verbose/>"
"""In messages of llguidance: that they are short."""
_IN_WORDS = {
    "NoExtensionBias": "no text fits: it allows nothing, or refers to itself without an end",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "oneOf: a value may fit two of its choices, which is not excluded as a text is written; anyOf is supported"
    ),
}
"""What some of llguidance's messages mean."""

STACK_BYTES = 4 * 2**20
"""Of the thread that compiles a constraint at the door: what passes there has room on an executor's, of 16 times that.
"""


class GrammarError(ValueError):
    """A constraint that cannot be followed; the message is llguidance's, or says what is wrong with its form."""


def new_matcher(spec: GrammarSpec, table: Any, *, apart: bool = False) -> Any:
    """Return an `llguidance.LLMatcher` at the beginning of an output; table: as from `TableSource.table`.

    apart: what holds the interpreter is done in another process, where it takes long.

    Raises GrammarError. Takes 1.5 ms for a schema of 20 lines, and up to seconds for one of thousands.
    """
    import llguidance

    matcher = llguidance.LLMatcher(
        table, to_grammar(spec, table, apart=apart), log_level=0, limits=llguidance.LLParserLimits(**_LIMITS)
    )
    if matcher.is_error():
        raise GrammarError(error_of(matcher, spec))
    return matcher


def error_of(matcher: Any, spec: GrammarSpec) -> str:
    """Return what is wrong with a matcher's constraint.

    Where a schema became a grammar of ours, its place and its text say nothing to who wrote the schema.
    """
    message = matcher.get_error()
    if spec.kind != "grammar" and _OF_SCHEMA in message:
        message = _LISTING.split(message[message.index(_OF_SCHEMA) :])[0]
    return short(message)


def to_grammar(spec: GrammarSpec, table: Any, *, apart: bool = False) -> str:
    """Return a constraint as llguidance's own form of a grammar; raises GrammarError. apart: as `new_matcher`."""
    from llguidance import LLMatcher

    match spec.kind:
        case "json_schema" | "json_object":
            schema = _json(spec.text, "the schema") if spec.kind == "json_schema" else json.loads(_OBJECT)
            if schema is True:
                schema = {}
            if not isinstance(schema, dict):
                raise GrammarError("the schema must be a JSON object, or true")
            return str(_of_schema(spec, schema))
        case "regex":
            return str(LLMatcher.grammar_from_regex(spec.text))
        case "grammar":
            try:
                return str(LLMatcher.grammar_from_lark(as_lark(spec.text, apart=apart)))
            except Exception as error:  # the converter of GBNF raises what its parser does
                message = f"the grammar cannot be converted: Failed to convert the grammar from GBNF to Lark: {error}"
                raise GrammarError(short(message)) from error
        case "choices":
            return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(_literal, spec.choices))))
        case "structural_tag":
            return _of_tags(spec, table)
    raise GrammarError("must have one of json_schema, regex, grammar, choices, json_object, structural_tag")


def short(message: str) -> str:
    """Return a message in one line, cut to a length that an error may have."""
    # A panic of the library comes with its stack.
    line = " ".join(message.partition("<backtrace>")[0].replace(_NOT_VERBOSE, "").split())
    for theirs, ours in _IN_WORDS.items():
        line = line.replace(theirs, ours)
    return line if len(line) <= _MAX_MESSAGE else line[:_MAX_MESSAGE] + " …"


def _of_schema(spec: GrammarSpec, schema: Any) -> str:
    from llguidance import LLMatcher

    schema = readable(schema)
    overrides: JsonCompileOptions = {}
    if spec.disable_any_whitespace:
        overrides["whitespace_flexible"] = False
    elif spec.whitespace_pattern:
        overrides["whitespace_pattern"] = spec.whitespace_pattern
    else:
        schema = with_whitespace(schema)
    if spec.disable_additional_properties:
        schema = closed(schema)
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides))
    except ValueError as error:
        raise GrammarError(short(str(error))) from error


def _of_tags(spec: GrammarSpec, table: Any) -> str:
    """Return the grammar of free text with tagged parts."""

    def special_id(text: str) -> int | None:
        ids = table.tokenize_str(text, parse_special=True)
        return int(ids[0]) if len(ids) == 1 and table.is_special_token(ids[0]) else None

    try:
        return grammar_of_tags(_json(spec.text, "the structural tag"), special_id)
    except ValueError as error:
        raise GrammarError(short(str(error))) from error


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text, object_hook=whole_sizes)
    except (ValueError, RecursionError) as error:
        raise GrammarError(short(f"{what} is no JSON: {error}")) from error


def _literal(text: str) -> str:
    """Return a text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)
