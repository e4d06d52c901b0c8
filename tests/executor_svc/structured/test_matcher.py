"""The state of a grammar against the language itself, and as a function of specification and token ids."""

from __future__ import annotations

import random
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.grammar.table import TableSource, table_source
from executor_svc.structured.compiler import Compiler
from executor_svc.structured.matcher import GrammarState
from tests.checkpoints import add_tokenizer
from tests.helpers.paths import ROOT

DEMO = ROOT / "models" / "cadenza-demo"
VOCAB, EOS = 2048, (1, 2)
PERSON = GrammarSpec(
    "json_schema",
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}, '
    '"tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3}}, "required": ["name", "age"], '
    '"additionalProperties": false}',
)
CHOICES = ("yes", "no", "not now", "yesterday", "ähm")


@pytest.fixture(scope="module")
def source() -> TableSource:
    found = table_source(str(DEMO), VOCAB, EOS)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def compiler(source: TableSource) -> Compiler:
    return Compiler(source)


def begun(compiler: Compiler, spec: GrammarSpec, *output: int, max_drafts: int = 0) -> GrammarState:
    state = GrammarState(spec, compiler, max_drafts)
    state.begin(output)
    state.walk_alone()
    return state


def allowed(state: GrammarState, row: int = 0) -> list[int]:
    """The ids that a mask allows."""
    bits = np.unpackbits(state.bits[row].view(np.uint8), bitorder="little")
    assert not bits[VOCAB:].any()
    found: list[int] = np.flatnonzero(bits[:VOCAB]).tolist()
    return found


def texts(compiler: Compiler) -> dict[int, bytes]:
    table = compiler.source.table()
    return {i: table.decode_bytes([i]) for i in range(VOCAB) if not table.is_special_token(i)}


def test_masks_allow_just_what_the_language_does(compiler: Compiler) -> None:
    """Choices: a token is allowed if what it makes is the beginning of a choice, and EOS where one is complete. Where
    only one text may follow, it is as the tokenizer would write it.
    """
    known = texts(compiler)
    options = [choice.encode() for choice in CHOICES]
    for seed in range(12):
        rng, state, output = random.Random(seed), begun(compiler, GrammarSpec("choices", choices=CHOICES)), b""
        while True:
            expected = [
                token for token, text in known.items() if text and any(o.startswith(output + text) for o in options)
            ]
            complete = output in options
            found = allowed(state)
            rest = {o[len(output) :][:1] for o in options if o.startswith(output)}
            if len(rest) > 1:
                assert found == sorted({*expected, *(EOS if complete else ())}), output
            assert bool(expected) == bool(set(found).difference(EOS))
            assert set(found).issubset({*expected, *(EOS if complete else ())})
            expected = [token for token in found if token not in EOS]
            if not expected:
                break
            token = rng.choice(expected)
            output += known[token]
            state.take([token])
        assert complete


@pytest.mark.slow
@given(seed=st.integers(0, 1000))
@settings(max_examples=25)
def test_a_state_is_a_function_of_its_tokens(source: TableSource, seed: int) -> None:
    """Rebuilt from the ids at once, it has the masks that it has token by token; drafts ahead change nothing."""
    compiler, rng, output = Compiler(source), random.Random(seed), list[int]()
    state = begun(compiler, PERSON, max_drafts=3)
    for _ in range(40):
        again = begun(compiler, PERSON, *output)
        assert (again.bits[0] == state.bits[0]).all()
        assert again.forced == state.forced
        choices = [token for token in allowed(state) if token not in EOS]
        if not choices:
            assert set(allowed(state)) == set(EOS)
            return
        output.append(rng.choice(choices))
        ahead = begun(compiler, PERSON, *output[:-1], max_drafts=3)
        ahead.look_ahead([output[-1]])
        state.take([output[-1]])
        assert ahead.num_masks == 2
        assert (ahead.bits[1] == state.bits[0]).all()
        assert not state.error


def test_masks_behind_drafts_end_with_the_first_that_is_not_allowed(compiler: Compiler) -> None:
    table = compiler.source.table()
    good, bad = table.tokenize_str('{"'), table.tokenize_str("x")
    state = begun(compiler, PERSON, max_drafts=4)
    before = state.bits[0].copy()
    drafts = [*good, *bad]
    assert state.num_allowed(drafts) == len(good)
    assert state.num_allowed([*good, EOS[0]]) == len(good)
    state.look_ahead(drafts)
    assert state.num_masks == 1 + len(good)
    assert not state.error
    assert (state.bits[0] == before).all()
    state.take(good)
    assert not state.error


def test_eos_only_where_nothing_else_may_follow(compiler: Compiler) -> None:
    """What ignore_eos means beside a grammar: "yes" is complete, but it may become "yesterday"."""
    table = compiler.source.table()
    for last_only in (False, True):
        spec = GrammarSpec("choices", choices=CHOICES, eos_last_only=last_only)
        state = begun(compiler, spec, *table.tokenize_str("yes"))
        assert set(EOS).isdisjoint(allowed(state)) == last_only
        state = begun(compiler, spec, *table.tokenize_str("yesterday"))
        assert allowed(state) == sorted(EOS)


def test_a_constraint_that_begins_behind_tokens(compiler: Compiler) -> None:
    spec = GrammarSpec("choices", choices=("no",), start_after_token_ids=(20, 21))
    state = begun(compiler, spec, 5, 20)
    assert not state.is_constrained
    state.take([20])
    state.take([21])
    assert state.is_constrained
    again = begun(compiler, spec, 5, 20, 20, 21)
    assert allowed(again) == allowed(state)
    assert allowed(state) == allowed(begun(compiler, GrammarSpec("choices", choices=("no",))))
    assert begun(compiler, spec, 20, 5, 21).is_constrained is False


def test_errors_are_the_sequences_own(compiler: Compiler) -> None:
    state = begun(compiler, GrammarSpec("choices", choices=("no",)), *compiler.source.table().tokenize_str("x"))
    assert state.error
    state.take([3])
    assert state.error
    assert begun(compiler, GrammarSpec("regex", "(")).error
    assert not begun(compiler, GrammarSpec("regex", "a")).error


def test_a_vocabulary_that_is_larger_than_the_tokenizers(tmp_path: Path) -> None:
    """Ids without a token are never allowed, and added tokens beyond the model's ids do no harm."""
    add_tokenizer(tmp_path, 300)
    large = table_source(str(tmp_path), 300, [1])
    assert large is not None
    state = begun(Compiler(large), GrammarSpec("json_object"))
    bits = np.unpackbits(state.bits[0].view(np.uint8), bitorder="little")
    assert bits[:261].any()
    assert not bits[261:].any()


@pytest.mark.parametrize(
    ("tokenizer", "eos"), [("", [1]), (str(DEMO), []), (str(ROOT / "docs"), [1]), ("no/such-model", [1])]
)
def test_where_there_is_no_table(tokenizer: str, eos: list[int]) -> None:
    assert table_source(tokenizer, VOCAB, eos) is None


def test_digests_tell_tables_apart(source: TableSource, tmp_path: Path) -> None:
    add_tokenizer(tmp_path, 300)
    others = [
        table_source(str(DEMO), VOCAB, EOS[:1]), table_source(str(DEMO), VOCAB + 1, EOS),
        table_source(str(tmp_path), VOCAB, EOS),
    ]  # fmt: skip
    digests = {each.engine().table_digest for each in [source, *others] if each is not None}
    assert len(digests) == 4
    again = table_source(str(DEMO), VOCAB, EOS[::-1])
    assert again is not None
    assert again.engine() == source.engine()
