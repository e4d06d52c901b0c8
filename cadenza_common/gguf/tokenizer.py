"""Builds a tokenizer from the metadata of a GGUF file: byte-level BPE, and sentencepiece's BPE as Llama 2 has it.

Token ids equal those of llama.cpp's llama_tokenize with parse_special, which tests/data/gguf_tokenizers records; absent
keys have its defaults. Keys: github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Tokenizer".
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cadenza_common.gguf.file import read_gguf
from cadenza_common.gguf.metadata import GgufMetadata, type_of
from cadenza_common.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_T = TypeVar("_T")

_PREFIX = "tokenizer.ggml"
_GEMMA4 = "gemma4"
_TEMPLATE = "tokenizer.chat_template"
_NO_MODEL = ("none", "no_vocab")
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Types of tokens that are not like others; 1 is a normal one, 5 an unused one."""
_ADDED = (_UNKNOWN, _CONTROL, _USER_DEFINED)
"""Types of tokens that are found in any text before it is split."""
_SPACE = "▁"
_MAX_TOKEN_CHARS = 1024
"""Of byte-level tokens. Models of the supported families have 256 at most."""
_MAX_PIECE_CHARS = 256
"""Of sentencepiece's tokens: the pairs that may become one are as many as its characters. Gemma's have 31."""
_MAX_PAIRS, _MAX_MERGES = 1 << 22, 1 << 20
"""Of all sentencepiece's tokens: pairs that may become one, and pairs that do. Gemma has 2 million and 600,000."""
_MAX_ADDED = 1 << 16
"""Tokens of their own in any text. Gemma has 6400."""
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The checked metadata of a tokenizer; ids are indexes of `tokens`."""

    metadata: GgufMetadata
    tokens: list[str]
    ids: dict[str, int]
    types: list[int]

    def special_id(self, name: str, default: int | None = None) -> int | None:
        """Return the id of tokenizer.ggml.<name>_token_id, None if it is absent."""
        key, count = f"{_PREFIX}.{name}_token_id", len(self.tokens)
        if key not in self.metadata:
            return default if default is not None and default < count else None
        token_id = self.metadata.integer(key, at_least=0)
        if token_id >= count:
            raise self.metadata.error(key, f"is {token_id}, there are {count} tokens")
        return token_id


def load_gguf_tokenizer(path: Path) -> Any | None:
    """Return the tokenizer of a file as one of transformers, with the chat template; None if it has none.

    Raises GgufError, which names the file and the key.
    """
    metadata = read_gguf(path).metadata
    if not has_tokenizer(metadata):
        return None
    vocabulary = _read_vocabulary(metadata)
    raw, bos, eos, unk, adds_bos = _parts(vocabulary)
    return _finished(raw, vocabulary, {"bos": bos, "eos": eos, "unk": unk}, adds_bos)


def has_tokenizer(metadata: GgufMetadata) -> bool:
    """Return whether a file holds a tokenizer."""
    return metadata.text(f"{_PREFIX}.model", "none") not in _NO_MODEL


def tokenizer_json(metadata: GgufMetadata) -> str:
    """Return the tokens of a file's tokenizer, and how they are bytes, in the form of a tokenizer.json.

    Without what it adds about each text. Raises GgufError, also for a file without a tokenizer.
    """
    vocabulary = _read_vocabulary(metadata)
    raw = _parts(vocabulary)[0]
    _add_tokens(raw, vocabulary)
    return str(raw.to_str())


def tokenizer_digest(metadata: GgufMetadata) -> bytes:
    """Return a SHA-256 over all that `tokenizer_json` is made from."""
    pairs = [(key, metadata.get(key)) for key in sorted(metadata) if key.startswith(f"{_PREFIX}.")]
    return hashlib.sha256(json.dumps([*pairs, metadata.get("general.name")]).encode()).digest()


def _read_vocabulary(metadata: GgufMetadata) -> _Vocabulary:
    key = f"{_PREFIX}.tokens"
    at_most = _MAX_TOKEN_CHARS if metadata.text(f"{_PREFIX}.model") == "gpt2" else _MAX_PIECE_CHARS
    tokens = [text or f"[EMPTY_{index}]" for index, text in enumerate(metadata.texts(key))]
    if not tokens:
        raise metadata.error(key, "is empty")
    ids: dict[str, int] = {}
    for token_id, text in enumerate(tokens):
        if len(text) > at_most:
            raise metadata.error(key, f"has {len(text)} characters at {token_id}; at most {at_most} are supported")
        if ids.setdefault(text, token_id) != token_id:
            raise metadata.error(key, f"has {text[:100]!r} twice: {ids[text]} and {token_id}")
    types = _of_each(metadata, "token_type", metadata.integers(f"{_PREFIX}.token_type", [1] * len(tokens)), tokens)
    types = [type_of(text, kind) for text, kind in zip(tokens, types, strict=True)]
    return _Vocabulary(metadata, tokens, ids, types)


def _of_each(metadata: GgufMetadata, name: str, values: list[_T], tokens: list[str]) -> list[_T]:
    """Return the values of the tokens; raises GgufError if there are fewer."""
    if len(values) < len(tokens):
        raise metadata.error(f"{_PREFIX}.{name}", f"has {len(values)} values for {len(tokens)} tokens")
    return values[: len(tokens)]


_Parts = tuple[Any, int | None, int | None, int | None, bool]
"""A raw tokenizer, the ids of BOS, EOS and the unknown token, and whether texts begin with BOS by default."""


def _parts(vocabulary: _Vocabulary) -> _Parts:
    metadata = vocabulary.metadata
    model = metadata.text(f"{_PREFIX}.model")
    if model not in ("gpt2", "llama", _GEMMA4):
        supported = f"gpt2 (byte-level BPE), llama (SPM), {_GEMMA4} (SPM with merges)"
        raise metadata.error(f"{_PREFIX}.model", f"is {model[:100]!r}; supported: {supported}")
    return _byte_level(vocabulary) if model == "gpt2" else _sentencepiece(vocabulary, model)


def _byte_level(vocabulary: _Vocabulary) -> _Parts:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    rules = _pre_tokenizer(vocabulary.metadata)
    merges = list(_stated_merges(vocabulary))
    raw = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=rules.ignores_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
    raw.decoder = decoders.ByteLevel()
    bos, eos, unk = (vocabulary.special_id(name) for name in ("bos", "eos", "unknown"))
    return raw, bos, eos, unk, rules.adds_bos


def _pre_tokenizer(metadata: GgufMetadata) -> PreTokenizer:
    key = f"{_PREFIX}.pre"
    name = metadata.text(key, "default")
    if name not in PRE_TOKENIZERS:
        raise metadata.error(key, f"is {name[:100]!r}; supported: {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _stated_merges(vocabulary: _Vocabulary) -> Iterator[tuple[str, str]]:
    """Yield the merges of the file; the first of equal ones counts."""
    metadata, ids, key = vocabulary.metadata, vocabulary.ids, f"{_PREFIX}.merges"
    seen: set[tuple[str, str]] = set()
    for index, merge in enumerate(metadata.texts(key)):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise metadata.error(key, f"has no two tokens at {index}: {merge[:100]!r}")
        unknown = next((text for text in (left, right, left + right) if text not in ids), None)
        if unknown is not None:
            raise metadata.error(key, f"names {unknown[:100]!r} at {index}, which is no token")
        if (left, right) not in seen:
            seen.add((left, right))
            yield left, right


def _sentencepiece(vocabulary: _Vocabulary, model: str) -> _Parts:
    from tokenizers import Tokenizer, decoders, models, normalizers

    unk = vocabulary.special_id("unknown", 0)
    merges = list(_stated_merges(vocabulary)) if model == _GEMMA4 else _scored_merges(vocabulary)
    raw = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=merges,
            unk_token=None if unk is None else vocabulary.tokens[unk],
            fuse_unk=True,
            byte_fallback=vocabulary.ids.keys() >= _BYTES,
        )
    )
    adds_space = vocabulary.metadata.flag(f"{_PREFIX}.add_space_prefix", True)
    # Each piece of text between added tokens is normalized on its own, so each gets a space.
    prefix = [normalizers.Prepend(_SPACE)] if adds_space else []
    raw.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    raw.decoder = decoders.Sequence(parts)
    return raw, vocabulary.special_id("bos", 1), vocabulary.special_id("eos", 2), unk, True


def _scored_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make up a token, those of the highest score first.

    sentencepiece and llama.cpp merge the pair whose token has the highest score, the leftmost of equal ones. Scores of
    trained vocabularies differ, so a rank for each pair does the same, except for the pairs of one token: they overlap
    in a run of one character only. There the longest left part comes first, as the leftmost merges leave it.
    """
    metadata, tokens = vocabulary.metadata, vocabulary.tokens
    scores = _of_each(metadata, "scores", metadata.numbers(f"{_PREFIX}.scores"), tokens)
    nan = next((token_id for token_id, score in enumerate(scores) if math.isnan(score)), None)
    if nan is not None:
        raise metadata.error(f"{_PREFIX}.scores", f"has NaN for token {nan}")
    num_pairs = sum(len(text) - 1 for text in tokens)
    if num_pairs > _MAX_PAIRS:
        problem = f"has tokens that may be made of {num_pairs} pairs; at most {_MAX_PAIRS} are supported"
        raise metadata.error(f"{_PREFIX}.tokens", problem)
    parts = {text: text for text, kind in zip(tokens, vocabulary.types, strict=True) if kind != _BYTE}
    merges: list[tuple[str, str]] = []
    for token_id in sorted(range(len(tokens)), key=lambda each: (-scores[each], each)):
        text = tokens[token_id]
        for cut in range(len(text) - 1, 0, -1):
            # The tokens themselves, so that merges share their texts.
            left = parts.get(text[:cut])
            if left is not None and (right := parts.get(text[cut:])) is not None:
                merges.append((left, right))
        if len(merges) > _MAX_MERGES:
            problem = f"has tokens that are made of over {_MAX_MERGES} pairs of tokens"
            raise metadata.error(f"{_PREFIX}.tokens", problem)
    return merges


def _finished(raw: Any, vocabulary: _Vocabulary, special: dict[str, int | None], adds_bos: bool) -> Any:
    """Return transformers' tokenizer with added tokens, with BOS and EOS about each text where the file wants them."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    metadata, tokens = vocabulary.metadata, vocabulary.tokens
    _add_tokens(raw, vocabulary)
    template = "$A"
    named: list[tuple[str, int]] = []
    for name, default in (("bos", adds_bos), ("eos", False)):
        stated = metadata.flag(f"{_PREFIX}.add_{name}_token", default)
        if not stated and not (name == "bos" and metadata.text(f"{_PREFIX}.model") == _GEMMA4):  # as in llama.cpp
            continue
        token_id = special[name]
        if token_id is None:
            raise metadata.error(f"{_PREFIX}.{name}_token_id", "is missing, and each text needs that token")
        template = f"{name} {template}" if name == "bos" else f"{template} {name}"
        named.append((name, token_id))
    if named:
        raw.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
    special["pad"] = vocabulary.special_id("padding")
    texts = {f"{name}_token": token_id for name, token_id in special.items() if token_id is not None}
    own = {name: tokens[token_id] for name, token_id in texts.items() if vocabulary.types[token_id] in _ADDED}
    # Without local_files_only, transformers looks up names of large vocabularies at the hub.
    inner = PreTrainedTokenizerFast(tokenizer_object=raw, local_files_only=True, **own)
    for name, token_id in texts.items():
        if name not in own:
            # For templates. The constructor would cut each text at a normal token, as no file of its type wants it.
            setattr(inner, name, tokens[token_id])
    inner.chat_template = _chat_templates(metadata)
    return inner


def _chat_templates(metadata: GgufMetadata) -> str | dict[str, str] | None:
    """Return the file's template, or those by name, which tokenizer.chat_templates lists, as transformers has them."""
    names = metadata.texts(f"{_TEMPLATE}s") if f"{_TEMPLATE}s" in metadata else ["tool_use"]
    templates = {name: metadata.text(f"{_TEMPLATE}.{name}") for name in names if f"{_TEMPLATE}.{name}" in metadata}
    if _TEMPLATE not in metadata:
        return templates or None
    default = metadata.text(_TEMPLATE)
    return {**templates, "default": default} if templates else default


def _add_tokens(raw: Any, vocabulary: _Vocabulary) -> None:
    """Make control, unknown and user-defined tokens of their own in any text."""
    from tokenizers import AddedToken

    name = vocabulary.metadata.text("general.name", "").lower()
    is_phi3 = "phi-3" in name or "phi3" in name
    added = [
        AddedToken(
            text,
            special=kind != _USER_DEFINED,
            normalized=False,
            # Phi-3's swallow the space after them, which files do not state.
            rstrip=is_phi3 and text not in _PHI3_KEEPS_SPACE,
        )
        for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in _ADDED
    ]
    if len(added) > _MAX_ADDED:
        problem = f"has {len(added)} control, unknown and user-defined tokens; at most {_MAX_ADDED} are supported"
        raise vocabulary.metadata.error(f"{_PREFIX}.token_type", problem)
    raw.add_tokens(added)
