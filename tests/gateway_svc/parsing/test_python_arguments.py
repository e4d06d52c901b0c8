"""Arguments in Python's form: those of Python, and those of JSON that a grammar forces, become the same object."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_svc.parsing.formats import Formats
from gateway_svc.parsing.output import Reading
from gateway_svc.parsing.python_call import PythonArguments
from tests.helpers.models.outputs_in_deltas import Token, message_of, parse, whole

TEXT = st.text(alphabet="ab \"'\\/{}[](),=:\n\t\x00\u2028é天😀u0nx", max_size=12)
LEAVES = [st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXT]
VALUES = st.recursive(
    st.one_of(*LEAVES),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=5,
)
KEYS = st.sampled_from(["a", "from", "class", "user-id", "x.y", "größe", "None_"])


def read(text: str, sizes: list[int] | None = None) -> str | None:
    """The JSON of arguments that come in pieces; None: these are no arguments."""
    arguments, start = PythonArguments(), 0
    for size in [*(sizes or []), len(text)]:
        piece = text[start : start + size]
        used = arguments.feed(piece, 0)
        start += len(piece)
        if arguments.is_bad or arguments.is_done:
            assert used == len(piece) or arguments.is_bad
            break
    return arguments.json if arguments.is_done else None


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    values=st.dictionaries(KEYS, VALUES, max_size=3),
    form=st.sampled_from(["json", "ascii", "python"]),
    sizes=st.lists(st.integers(1, 5), max_size=12),
)
def test_what_is_written_is_read(values, form, sizes):
    write = {
        "json": lambda value: json.dumps(value, ensure_ascii=False),
        "ascii": lambda value: json.dumps(value).replace("/", r"\/"),
        "python": repr,
    }[form]
    text = ", ".join(f"{key}={write(value)}" for key, value in values.items()) + ")"
    found = read(text, sizes)
    assert found is not None
    assert json.loads(found) == values
    found.encode()
    assert read(text) == found


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="\"'\\nux0a1\n天", max_size=9))
def test_strings_are_those_of_python(text):
    """Where both languages have the escape, and in what only Python has."""
    for quote in "'\"":
        try:
            expected = ast.literal_eval(quote + text + quote)
        except (SyntaxError, ValueError):
            continue
        found = read(f"a={quote}{text}{quote})")
        if found is not None and isinstance(expected, str):
            assert json.loads(found) == {"a": expected}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r'a="\ud83d\ude00")', r'{"a": "\ud83d\ude00"}'),
        (r'a="\ud800")', r'{"a": "\ud800"}'),
        (r"a='\ud800')", r'{"a": "\ud800"}'),
        ("a=1e999)", '{"a": 1e999}'),
        (f"a={'9' * 5000})", f'{{"a": {"9" * 5000}}}'),
        ("a=true, b=[False, null, None])", '{"a": true, "b": [false, null, null]}'),
        ("a=(1, 2), b=(3), c=(4,), d=(), e=[5, ], f={'g': 6,},)",
         '{"a": [1, 2], "b": 3, "c": [4], "d": [], "e": [5], "f": {"g": 6}}'),
        ("a = 0x10 , b=1_000,c=.5,d=+1)", '{"a": 16, "b": 1000, "c": 0.5, "d": 1}'),
        ('a="one\ntwo")', '{"a": "one\\ntwo"}'),
        (r'a="\d\x41\101\/")', r'{"a": "\\dAA/"}'),
        (")", "{}"),
    ],
)  # fmt: skip
def test_literals(text, expected):
    assert read(text) == expected
    assert read(text, [1] * len(text)) == expected


@pytest.mark.parametrize(
    "text",
    ["1)", "a)", "a=)", "a=b)", "a=1 2)", "a=1, a=2)", "a=f())", "a={1: 2})", "a={'b'})", "a=nan)", "a=[,])", "a=07)",
     "a=1]", "a=[1)", "**a)", "a=-)", "a=1-2)", "'a'=1)", "a=r'b')", "a='b' 'c')", "a=[1)])", "a=(,))"],
)  # fmt: skip
def test_what_is_no_call_with_literals(text):
    assert read(text) is None
    assert read(text, [1] * len(text)) is None


@pytest.mark.parametrize("name", ["get-weather", "a.b", "2nd", "ns:f/g"])
def test_the_names_of_tools_need_not_be_pythons(name):
    text = f"[{name}(a=1), {name}()]"
    reading = Reading(Formats(tools="pythonic"), (name, "a"))
    calls = message_of(parse(reading, [whole([Token(text)])])).calls
    assert [(call.name, call.arguments) for call in calls] == [(name, '{"a": 1}'), (name, "{}")]
