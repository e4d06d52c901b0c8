"""Tokenizers' files that hold other types than transformers expects: refused in one line by field and rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.requests.tokenizer import TokenizerError, load_tokenizer
from scheduler_svc.requests.tokenizer_files import problem_of
from tests.checkpoints import add_tokenizer

_TOKEN = "must be a text, or an object with its content"
_TEMPLATE = "must be a text, or a list of objects with name and template"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    add_tokenizer(tmp_path, 270)
    return tmp_path


def edit(folder: Path, **fields: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("chat_template", 5, f"{_TEMPLATE}, not 5"),
        ("chat_template", ["x"], f"{_TEMPLATE}, not ['x']"),
        ("chat_template", {"a": 1}, f"{_TEMPLATE}, not {{'a': 1}}"),
        ("chat_template", [{"name": 1, "template": "x"}], f"{_TEMPLATE}, not an array of 1"),
        ("bos_token", 5, f"{_TOKEN}, not 5"),
        ("eos_token", ["</s>"], f"{_TOKEN}, not ['</s>']"),
        ("pad_token", {"content": 3}, f"{_TOKEN}, not {{'content': 3}}"),
        ("added_tokens_decoder", [], "must be an object of objects with the content of a token, not []"),
        (
            "added_tokens_decoder",
            {"1": "a"},
            "must be an object of objects with the content of a token, not {'1': 'a'}",
        ),
        ("model_max_length", "x" * 10**6, f"must be a number, not '{'x' * 99}..."),
        ("model_max_length", True, "must be a number, not True"),
        ("tokenizer_class", ["x"], "must be a text, not ['x']"),
        ("clean_up_tokenization_spaces", "no", "must be true or false, not 'no'"),
        ("add_bos_token", 1, "must be true or false, not 1"),
    ],
)
def test_fields_of_another_type(folder: Path, field: str, value: Any, problem: str) -> None:
    edit(folder, **{field: value})
    with pytest.raises(TokenizerError) as raised:
        load_tokenizer(str(folder))
    expected = f"cannot load a tokenizer from '{folder}': tokenizer_config.json: {field} {problem} (--tokenizer "
    assert str(raised.value).startswith(expected)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[" * 100_000, "cannot be read: it is nested too deeply"),
        ("{", "cannot be read: "),
        ("[]", "holds no JSON object"),
    ],
)
def test_files_that_are_no_object(folder: Path, content: str, problem: str) -> None:
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=f"': tokenizer_config.json {problem}"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("content", "problem"), [("[" * 100_000, "a file of it is nested too deeply"), ("{}", "KeyError: 'added_tokens'")]
)
def test_a_broken_tokenizer(folder: Path, content: str, problem: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=f"': {problem} \\(--tokenizer names another"):
        load_tokenizer(str(folder))


def test_what_real_files_hold(folder: Path) -> None:
    """Tokens as objects, templates by name, no limit of length."""
    token = {
        "__type": "AddedToken",
        "content": "<s>",
        "special": True,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    edit(
        folder,
        bos_token=token,
        pad_token=None,
        added_tokens_decoder={"0": token},
        chat_template=[{"name": "default", "template": "x"}, {"name": "rag", "template": "y"}],
        model_max_length=1000000000000000019884624838656,
    )
    assert problem_of(folder) is None
    assert load_tokenizer(str(folder)) is not None
    (folder / "tokenizer_config.json").unlink()
    assert problem_of(folder) is None
