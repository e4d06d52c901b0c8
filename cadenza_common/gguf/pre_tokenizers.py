"""Regular expressions that split text into words, by the names of tokenizer.ggml.pre: those of the families here.

They are llama.cpp's. Where the model's own tokenizer.json has another expression, this says so; ids then differ.
"""

from __future__ import annotations

from dataclasses import dataclass

_ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
"""tokenizer.json has (?i:'s|...): that takes ſ (U+017F) for an s too."""
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_UPPER, _LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
"""tokenizer.json has classes of letters and \\p{M}: there, accented letters have a case too, and marks join letters."""
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_OTHERS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is split before merges."""

    patterns: tuple[str, ...]
    """Each splits what the ones before have left: its matches and the text between them."""
    ignores_merges: bool = False
    """Whether a word that is a token needs no merges."""
    adds_bos: bool = False
    """Whether a text begins with BOS if tokenizer.ggml.add_bos_token is absent."""


def _words(numbers: str) -> str:
    return rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}|{_OTHERS}|{_REST}"


_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_GPT2_WORDS = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignores_merges=True, adds_bos=True)
_LLAMA3_MERGED = PreTokenizer(_LLAMA3.patterns)
_QWEN2 = PreTokenizer((_words(r"\p{N}"),))
_TEKKEN = PreTokenizer((rf"{_CASED % ('', '')}|\p{{N}}|{_CASED_OTHERS}",), ignores_merges=True, adds_bos=True)
_GPT4O = PreTokenizer((rf"{_CASED % (f'{_ENDINGS}?', f'{_ENDINGS}?')}|\p{{N}}{{1,3}}|{_CASED_OTHERS}",))

PRE_TOKENIZERS = {
    "default": _DEFAULT,
    "gpt-2": _GPT2_WORDS,
    "phi-2": _GPT2_WORDS,
    "granite-docling": _GPT2_WORDS,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": _LLAMA3_MERGED,
    "smaug-bpe": _LLAMA3_MERGED,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
}
"""Granite has refact, Phi-4 dbrx, Phi-4-mini gpt-4o, Mistral Nemo tekken."""
