"""Token ids that end a text, by the files of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from executor_svc.models.config.end_ids import end_ids

ADDED = {"id": 7, "content": "<|im_end|>", "special": True}


def ends(folder: Path, *, config: dict[str, Any], tokenizer: dict[str, Any] | None = None, **files: Any) -> list[int]:
    for name, content in {"tokenizer_config": config, "tokenizer": tokenizer}.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return end_ids(folder, {f"{name}.json": content for name, content in files.items()})


@pytest.mark.parametrize(
    ("config", "tokenizer", "own"),
    [
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": {"7": ADDED, "6": {"content": "x"}}}, None, [7]),
        ({"eos_token": {"content": "<|im_end|>"}}, {"added_tokens": [{"id": 6, "content": "x"}, ADDED]}, [7]),
        ({"eos_token": "</s>"}, {"added_tokens": [ADDED], "model": {"vocab": {"</s>": 2}}}, [2]),
        ({"eos_token": "<|im_end|>"}, {"added_tokens": [], "model": {"vocab": [["a", 0.0]]}}, []),
        ({"eos_token": "<|im_end|>"}, None, []),
        ({"eos_token": None}, {"added_tokens": [ADDED]}, []),
        ({"eos_token": 5, "added_tokens_decoder": [1]}, {"added_tokens": 3, "model": 4}, []),
        ({}, None, []),
    ],
)
def test_the_tokenizers_own(tmp_path: Path, config: dict[str, Any], tokenizer: Any, own: list[int]) -> None:
    assert ends(tmp_path, config=config, tokenizer=tokenizer, config_files={}) == own


def test_all_files_count(tmp_path: Path) -> None:
    config = {"eos_token": "<|im_end|>", "added_tokens_decoder": {"7": ADDED}}
    assert ends(tmp_path, config=config, first={"eos_token_id": 9}, second={"eos_token_id": [1, 9]}) == [1, 7, 9]


def test_those_of_the_text_part(tmp_path: Path) -> None:
    """As Qwen3.5 is published; the model's own come first."""
    text = {"text_config": {"eos_token_id": 5}}
    assert ends(tmp_path, config={}, config_files=text, second={"eos_token_id": 3}) == [3, 5]
    assert ends(tmp_path, config={}, config_files=text | {"eos_token_id": [4]}) == [4]
