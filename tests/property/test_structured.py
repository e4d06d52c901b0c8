"""Over drawn schemas and patterns: what ends by itself is valid, and what is cut is the beginning of something valid.

Tokens are drawn from each mask with equal chances, as a model would that knows nothing; jsonschema and `re` judge.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import hypothesis.strategies as st
import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings

from cadenza_common.grammar.compiling import GrammarError, new_matcher
from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.grammar.table import table_source
from executor_svc.structured.compiler import Compiler
from executor_svc.structured.matcher import GrammarState
from tests.helpers.paths import ROOT

VOCAB, EOS = 2048, 1
CLOSING = ["}", "]", '"', "e", "l", "u", "0", "1", ":", ",", " "]
"""What brings a JSON text to its end, roughly in this order."""


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    source = table_source(str(ROOT / "models" / "cadenza-demo"), VOCAB, [EOS])
    assert source is not None
    return Compiler(source)


names = st.text("abcxyz_", min_size=1, max_size=6)
leaves = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.just({"type": "integer"}),
    st.just({"type": "number"}),
    st.builds(
        lambda low, width: {"type": "integer", "minimum": low, "maximum": low + width},
        st.integers(-120, 500),
        st.integers(0, 400),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 4),
        st.integers(0, 8),
    ),
    st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from(["a", "bc", 1, -2.5, True, None]), min_size=1)),
    st.builds(lambda value: {"const": value}, st.sampled_from(["fixed", 7, False])),
    st.sampled_from([{"type": "string", "pattern": pattern} for pattern in ("^[a-c]{2,5}$", "^x+y?$", "[0-9]{3}")]),
)


def arrays(items: Any) -> Any:
    return st.builds(
        lambda item, low, more: {"type": "array", "items": item, "minItems": low, "maxItems": low + more},
        items,
        st.integers(0, 2),
        st.integers(0, 3),
    )


def objects(values: Any) -> Any:
    def build(properties: dict[str, Any], required: int, closed: bool) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        schema["required"] = sorted(properties)[: required % (len(properties) + 1)]
        return schema | ({"additionalProperties": False} if closed else {})

    return st.builds(build, st.dictionaries(names, values, max_size=4), st.integers(0, 4), st.booleans())


schemas = st.recursive(
    leaves,
    lambda inner: arrays(inner) | objects(inner) | st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
    max_leaves=8,
)


def in_string(text: str) -> bool:
    """Whether a JSON text ends within a string."""
    return len(re.findall(r'(?<!\\)(?:\\\\)*"', text)) % 2 == 1


def walk(compiler: Compiler, spec: GrammarSpec, rng: random.Random, most: int) -> tuple[str, bool]:
    """An output of so many tokens, completed as fast as can be if it was cut; and whether it ended by itself."""
    state, table, output = GrammarState(spec, compiler, 0), compiler.source.table(), list[int]()
    state.begin(())
    quote_or_digit = [table.tokenize_str(text)[0] for text in '"0']
    is_json = spec.kind == "json_schema"
    closing = [table.tokenize_str(text)[0] for text in (CLOSING if is_json else "abcdexy0é")]
    while True:
        assert not state.error, state.error
        allowed = np.flatnonzero(np.unpackbits(state.bits[0].view(np.uint8), bitorder="little")).tolist()
        assert allowed
        assert max(allowed) < VOCAB
        if len(output) < most:
            # EOS by its own weight, as a model that wants to end now and then.
            token = EOS if EOS in allowed and rng.random() < 0.2 else rng.choice(allowed)
        else:
            # Now and then another one, as a pattern may want a letter where it also takes one digit more.
            last = quote_or_digit if is_json and in_string(table.decode_str(output)) else closing
            if not is_json:
                rng.shuffle(last)
            wanted = [EOS, *last] if rng.random() < 0.7 else [EOS]
            token = next((each for each in wanted if each in allowed), rng.choice(allowed))
            assert len(output) < most + 600, table.decode_str(output)
        if token == EOS:
            return table.decode_str(output), len(output) <= most
        output.append(token)
        state.take([token])


@given(schema=schemas, compact=st.booleans(), seed=st.integers(0, 10_000), most=st.sampled_from([3, 25, 120]))
@settings(max_examples=40)
def test_every_output_is_of_the_schema(
    compiler: Compiler, schema: dict[str, Any], compact: bool, seed: int, most: int
) -> None:
    spec = GrammarSpec("json_schema", json.dumps(schema), disable_any_whitespace=compact)
    try:
        new_matcher(spec, compiler.source.table())
    except GrammarError as error:
        assert str(error)  # noqa: PT017
        return
    text, _ = walk(compiler, spec, random.Random(seed), most)
    jsonschema.validate(json.loads(text), schema)


@given(
    parts=st.lists(
        st.tuples(
            st.sampled_from(["[a-c]", "x", "[0-9]", "(ab|cde)", '[^a-z"]', "é", "."]),
            st.sampled_from(["", "?", "*", "+", "{2}", "{1,4}"]),
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 10_000),
    most=st.sampled_from([2, 12, 40]),
)
@settings(max_examples=30)
def test_every_output_matches_the_expression(
    compiler: Compiler, parts: list[tuple[str, str]], seed: int, most: int
) -> None:
    pattern = "".join(part + count for part, count in parts)
    text, _ = walk(compiler, GrammarSpec("regex", pattern), random.Random(seed), most)
    assert re.fullmatch(pattern, text), (pattern, text)
