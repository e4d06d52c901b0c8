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

_LLAMA3_OWN_BOS = PreTokenizer(_LLAMA3.patterns, ignores_merges=True)
_QWEN35 = PreTokenizer(
    (
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}",
    )
)
_FALCON = PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))
_DEEPSEEK_CODER = PreTokenizer(
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+", r"\p{N}")
)

_NAMES = {
    _DEFAULT: "default",
    _GPT2_WORDS: "gpt-2 phi-2 granite-docling a.x-4.0 exaone4 gigachat jais jina-de jina-es jina-v2-de jina-v2-es "
    "mellum modern-bert mpt olmo trillion",
    _SINGLE_DIGITS: "smollm starcoder refact codeshell command-r exaone mellum2 minerva-7b",
    _LLAMA3: "llama-bpe llama3 llama-v3 falcon3 pixtral falcon-h1 jina-v5-nano lfm2 midm-2.0",
    _LLAMA3_OWN_BOS: "glm4 glm5",
    _LLAMA3_MERGED: "dbrx smaug-bpe chatglm-bpe",
    _QWEN2: "qwen2 deepseek-r1-qwen megrez f2llmv2 grok-2 hunyuan kormo solar-open stablelm2",
    _QWEN35: "qwen35",
    _TEKKEN: "tekken",
    _GPT4O: "gpt-4o kanana2 llama4 minimax-m2 talkie",
    _FALCON: "falcon",
    _DEEPSEEK_CODER: "deepseek-coder",
}
"""Granite has refact, Phi-4 dbrx, Phi-4-mini gpt-4o, Mistral Nemo tekken."""

PRE_TOKENIZERS = {name: rules for rules, names in _NAMES.items() for name in names.split()}
