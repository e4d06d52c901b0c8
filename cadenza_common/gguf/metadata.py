"""Checked access to the metadata of a GGUF file (errors name the file and the key), and what its tokens mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from cadenza_common.brief import brief

MetadataValue = str | bool | int | float | list[str] | list[bool] | list[int] | list[float]
_CONTROL, _USER_DEFINED = 3, 4

END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"))
"""Keys of tokens that end a generation."""

END_TEXTS = frozenset(
    (
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
        "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
        "</s>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[", "<|fim_pad|>", "<fim-pad>",
        "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>",
        "<|file_sep|>",
    )
)  # fmt: skip
"""Texts of tokens that end a generation."""

_CONTROL_TEXTS = END_TEXTS | frozenset(
    (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
        "<|prefix|>", "<|suffix|>", "<|middle|>",
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
    )
)  # fmt: skip
_SHOWN_TEXTS = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))


class GgufError(ValueError):
    """A file is no GGUF file, or one that is broken or not supported; the message names the file and the place."""


class GgufMetadata:
    """The pairs of a file's header, such as general.architecture."""

    def __init__(self, path: Path, pairs: dict[str, MetadataValue]) -> None:
        self.path = path
        self._pairs = pairs

    def __contains__(self, key: str) -> bool:
        return key in self._pairs

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def get(self, key: str) -> MetadataValue | None:
        """Return a value unchecked, None if it is absent."""
        return self._pairs.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string; without a default it is required, here and in the following methods."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, "must be a string")
        return value

    def integer(self, key: str, default: int | None = None, at_least: int = 1) -> int:
        """Return an integer of at least `at_least`."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise self.error(key, f"must be an integer of at least {at_least}, not {brief(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(key, f"must be a finite number, not {brief(value)}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {brief(value)}")
        return value

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        """Return an array of strings."""
        value = self._value(key, default)
        texts = [item for item in value if isinstance(item, str)] if isinstance(value, list) else None
        if texts is None or not isinstance(value, list) or len(texts) != len(value):
            raise self.error(key, "must be an array of strings")
        return texts

    def integers(self, key: str, default: list[int] | None = None) -> list[int]:
        """Return an array of integers."""
        value = self._value(key, default)
        integers = [item for item in value if type(item) is int] if isinstance(value, list) else None
        if integers is None or not isinstance(value, list) or len(integers) != len(value):
            raise self.error(key, "must be an array of integers")
        return integers

    def numbers(self, key: str, default: list[float] | None = None) -> list[float]:
        """Return an array of numbers, which may be infinite."""
        value = self._value(key, default)
        numbers = [float(item) for item in value if type(item) in (int, float)] if isinstance(value, list) else None
        if numbers is None or not isinstance(value, list) or len(numbers) != len(value):
            raise self.error(key, "must be an array of numbers")
        return numbers

    def error(self, key: str, problem: str) -> GgufError:
        """Return an error about a key, for the caller to raise."""
        return GgufError(f"{self.path}: metadata {key} {problem}")

    def _value(self, key: str, default: object) -> object:
        value = self._pairs.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        return value


def type_of(text: str, stated: int) -> int:
    """Return the type of a token: that which the file states, unless its text is known."""
    if text in _CONTROL_TEXTS:
        return _CONTROL
    return _USER_DEFINED if text in _SHOWN_TEXTS else stated
