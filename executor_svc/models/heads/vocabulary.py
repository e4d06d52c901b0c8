"""Compares the vocabularies of two tokenizers, as their files hold them: a draft's token ids must be the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cadenza_common.brief import brief
from cadenza_common.gguf.file import GgufError
from executor_svc.models.folder import LoaderError, gguf_of, read_json, resolve_folder

Texts = dict[int, str]
"""The text of each token id, as a file spells it: with Ġ or ▁ for a space."""


def check_same_tokens(draft: str, target: str) -> bool:
    """Check that ids with a text in both tokenizers have the same one; return whether both have files to compare.

    The texts of `tokenizer.json` (its model's vocabulary and its added tokens), of `vocab.json` with
    `added_tokens.json`, or of a GGUF file are compared. Ids that only one of them names may be anything: files of the
    same vocabulary differ in padding and in unused ids. Merges and normalizers do not matter: a draft reads and writes
    ids.

    draft, target: folder, GGUF file or hub id of a tokenizer, as `folder.tokenizer_of` returns it; "" for none. Raises
    LoaderError for an id with two texts.
    """
    if not draft or not target:
        return False
    ours, theirs = token_texts(draft), token_texts(target)
    if not ours or not theirs:
        return False
    differing = sorted(token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token])
    if differing:
        first = differing[0]
        raise LoaderError(
            f"its vocabulary is not the target's: token {first} is {brief(ours[first])} in the draft's tokenizer and "
            f"{brief(theirs[first])} in that of --model; {len(differing)} of {len(ours.keys() & theirs.keys())} ids "
            "differ"
        )
    return True


def token_texts(tokenizer: str) -> Texts:
    """Return the texts of a tokenizer's ids; empty if none of its files is one that is read here."""
    gguf = gguf_of(tokenizer)
    if gguf is not None:
        try:
            return dict(enumerate(gguf.metadata.texts("tokenizer.ggml.tokens")))
        except GgufError as error:
            raise LoaderError(f"--model {tokenizer}: {error}") from None
    folder = resolve_folder(tokenizer, with_weights=False)
    if (folder / "tokenizer.json").is_file():
        return _of_tokenizer_json(folder)
    if (folder / "vocab.json").is_file():
        texts = _by_id(read_json(folder, "vocab.json", required=True))
        return texts | _by_id(read_json(folder, "added_tokens.json", required=False))
    return {}


def _of_tokenizer_json(folder: Path) -> Texts:
    content = read_json(folder, "tokenizer.json", required=True)
    model, added = content.get("model"), content.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # Unigram: [text, score], in the order of the ids
        vocabulary = {pair[0]: token for token, pair in enumerate(vocabulary) if isinstance(pair, list) and pair}
    if not isinstance(vocabulary, dict) or not isinstance(added, list):
        raise LoaderError(f"model folder {folder}: tokenizer.json has no vocabulary")
    texts = _by_id(vocabulary)
    for token in added:
        if isinstance(token, dict) and isinstance(token.get("id"), int) and isinstance(token.get("content"), str):
            texts[token["id"]] = token["content"]
    return texts


def _by_id(vocabulary: dict[str, Any]) -> Texts:
    return {token: text for text, token in vocabulary.items() if isinstance(token, int) and isinstance(text, str)}
