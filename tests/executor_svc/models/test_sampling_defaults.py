"""Sampling parameters from a model's files: those of generation_config.json, and of general.sampling in a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from executor_svc.config import ExecutorConfig
from executor_svc.models.folder import LoaderError
from executor_svc.models.sampling_defaults import sampling_defaults
from tests.helpers.models.gguf_vocabularies import write_vocabulary


def of_folder(folder: Path, content: dict[str, Any], **options: Any) -> dict[str, float]:
    (folder / "generation_config.json").write_text(json.dumps(content), encoding="utf-8")
    return sampling_defaults(ExecutorConfig(model=str(folder), **options))


def test_the_fields_that_there_are(tmp_path: Path) -> None:
    content = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20.0,
        "min_p": None,
        "max_new_tokens": 300,
        "eos_token_id": 2,
    }
    found = of_folder(tmp_path, content | {"do_sample": False, "repetition_penalty": 1.05})
    assert found == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 300}
    assert isinstance(found["top_k"], int)
    assert of_folder(tmp_path, content, generation_config="none") == {}


def test_a_folder_without_the_file_suggests_nothing(tmp_path: Path) -> None:
    assert sampling_defaults(ExecutorConfig(model=str(tmp_path))) == {}
    assert sampling_defaults(ExecutorConfig(model="some/model", simulate="instant")) == {}


def test_keys_of_a_gguf_file(tmp_path: Path) -> None:
    keys = {"temp": 0.6, "top_k": 40, "penalty_repeat": 1.25, "min_p": 0.125, "mirostat": 0}
    path = tmp_path / "model.gguf"
    write_vocabulary(path, {"model": "none"} | {f"general.sampling.{name}": value for name, value in keys.items()})
    expected = {"temperature": 0.6, "top_k": 40, "repetition_penalty": 1.25, "min_p": 0.125}
    assert sampling_defaults(ExecutorConfig(model=str(path))) == expected


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("temperature", -0.1, "a number of 0 or more"),
        ("temperature", "hot", "a number of 0 or more"),
        ("temperature", [0.6], "a number of 0 or more"),
        ("temperature", 10**400, "a number of 0 or more"),
        ("top_p", 0, "a number over 0 and at most 1"),
        ("top_k", 2.5, "an integer of -1 or more"),
        ("top_k", True, "an integer of -1 or more"),
        ("min_p", 1.5, "a number from 0 to 1"),
        ("repetition_penalty", 0, "a number over 0"),
        ("max_new_tokens", 0, "an integer of 1 or more"),
    ],
)
def test_values_that_no_request_may_have_are_named(tmp_path: Path, name: str, value: Any, rule: str) -> None:
    with pytest.raises(LoaderError, match=f"{name} in generation_config.json must be {rule}") as raised:
        of_folder(tmp_path, {name: value})
    assert "--generation-config none" in str(raised.value)
    assert len(str(raised.value)) < 500
