"""Is the table of docs/errors.md whole? A row for each call and field, and for each mistake that it can have."""

from __future__ import annotations

import re

import pytest

from scheduler_svc.convert.limits import LIMITS, MAX_PROMPT_CHARS, MAX_PROMPT_TOKENS
from tests.helpers.errors.error_table import CALLS, fields_of, read_rows

ROWS = read_rows()
SUBJECTS = [(row, row.subject()) for row in ROWS if isinstance(row.changes, dict)]
SET_FIELDS = [(row, spot, value) for row, subject in SUBJECTS for spot, value in fields_of(subject)]
REQUESTS = {name: call.request.DESCRIPTOR for name, call in CALLS.items()}


def leaves_of(descriptor, path=""):
    """Path and field of everything that a request can hold; a session's Generate is Generate's own matter."""
    for field in descriptor.fields:
        spot = path + field.name
        yield spot, field
        inner = field.message_type
        if inner is not None and not inner.GetOptions().map_entry and inner.name != "GenerateRequest":
            yield from leaves_of(inner, f"{spot}.")


def rows_about(call, path):
    """(row, value) of the rows that set this field."""
    return [(row, value) for row, spot, value in SET_FIELDS if row.call == call and spot == path]


ALL_FIELDS = [(call, path, field) for call, request in REQUESTS.items() for path, field in leaves_of(request)]


def test_every_call_has_a_row():
    assert {row.call.removesuffix(" stream") for row in ROWS} == set(CALLS)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "path", "field"), ALL_FIELDS, ids=[f"{call}-{path}" for call, path, _ in ALL_FIELDS])
def test_every_field_has_its_rows(call, path, field):
    rows = rows_about(call, path) or (call == "Tokenize" and rows_about("Generate", path))
    assert rows, "no row sets this field"
    if field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
        refused = [value for row, value in rows if row.status == "INVALID_ARGUMENT"]
        assert any(value != value for value in refused), "no row has NaN"
        assert any(value == float("inf") for value in refused), "no row has infinity"
    elif field.enum_type is not None:
        unknown = [row for row, value in rows if value not in field.enum_type.values_by_number]
        assert unknown, "no row has a number that is none of the enum's"
        assert {row.status for row in unknown} == {"INVALID_ARGUMENT"}


@pytest.mark.parametrize("name", LIMITS)
def test_every_limit_has_its_rows(name):
    """One more than allowed is refused, for each request that holds the field."""
    limit = LIMITS[name]
    holders = [(call, path) for call, path, field in ALL_FIELDS if field.full_name == f"cadenza.v1.{name}"]
    for call, path in holders:
        messages = [row.message for row, _ in rows_about(call, path)]
        for number in filter(None, (limit.length, limit.items)):
            expected = rf"has {number + 1} \w+; at most {number} are allowed"
            assert any(re.fullmatch(expected, message) for message in messages), (call, path, number)
        if limit.total is not None:
            expected = f"has {limit.total + 1} characters in all; at most {limit.total} are allowed"
            assert expected in messages, (call, path)
    assert holders


@pytest.mark.parametrize("call", ["Generate", "Tokenize"])
def test_the_limits_of_a_whole_prompt_have_their_rows(call):
    messages = {row.message for row in ROWS if row.call == call}
    assert f"the prompt's texts have over {MAX_PROMPT_CHARS} characters in all" in messages
    assert f"the prompt has over {MAX_PROMPT_TOKENS} token ids" in messages
