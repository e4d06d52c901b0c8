"""docs/sampling.md against the code: every field, its default, and tests that exist."""

from __future__ import annotations

import dataclasses
import re

from cadenza import SamplingParams
from cadenza.v1 import types_pb2
from tests.helpers.paths import ROOT


def table() -> dict[str, list[str]]:
    """By field, the other cells of its row."""
    lines = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    assert len({row[0] for row in rows}) == len(rows), "a field has two rows"
    return {row[0].strip("`"): row[1:] for row in rows}


def test_every_field_of_the_protocol_has_a_row() -> None:
    assert set(table()) == {field.name for field in types_pb2.SamplingParams.DESCRIPTOR.fields}


def test_names_and_defaults_are_the_clients() -> None:
    # The protocol's name says what it is, the clients' is vLLM's.
    names = {"grammar": "structured_outputs"}
    documented = {names.get(name, name): cells[0].strip("`") for name, cells in table().items()}
    defaults = SamplingParams()
    assert documented == {field.name: repr(getattr(defaults, field.name)) for field in dataclasses.fields(defaults)}


def test_rows_say_what_a_field_means_and_which_test_checks_it() -> None:
    for name, (_, _, meaning, _, checked_by) in table().items():
        assert meaning, name
        path, function = re.fullmatch(r"`(\S+)::(\w+)`", checked_by).groups()
        source = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {function}\(", source, re.MULTILINE), f"{name}: there is no {checked_by}"


def test_tests_named_in_the_text_exist() -> None:
    text = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert len(named) > len(table())
    for path, function in named:
        assert f"def {function}(" in (ROOT / "tests" / path).read_text(encoding="utf-8")
