"""Small tokenizers with the markers of tool calls and thoughts, and answers that a model would write."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerFast

from tests.helpers.models.chat_templates import HERMES, MISTRAL
from tests.helpers.models.toy_tokenizers import hf_byte_level
from tests.helpers.scheduler.scripted_executor import EOS

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
MISTRAL_MARKERS = ("[TOOL_CALLS]", "[ARGS]")


@cache
def hermes_tokenizer() -> PreTrainedTokenizerFast:
    """As Qwen3: the markers are tokens of their own, and stay in texts."""
    inner = hf_byte_level()
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    inner.chat_template = HERMES
    return inner


@cache
def mistral_tokenizer() -> PreTrainedTokenizerFast:
    """The markers are special tokens: texts are without them."""
    inner = hf_byte_level()
    inner.add_tokens(
        [AddedToken(text, special=True, normalized=False) for text in MISTRAL_MARKERS], special_tokens=True
    )
    inner.chat_template = MISTRAL
    return inner


def saved(tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    """Save a tokenizer; returns the folder."""
    tokenizer.save_pretrained(folder)
    return str(folder)


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A call as Hermes writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class _Always(dict[int, list[int]]):
    """One script for all seeds: not every API has one."""

    def get(self, key: object, default: object = None) -> Any:
        return self[0]


def scripts(w: Any, tokenizer: PreTrainedTokenizerFast) -> Callable[[str], list[int]]:
    """Sets what the model writes, from then on."""

    def script(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        w.executor.scripts = _Always({0: [*ids, EOS]})
        return ids

    return script
