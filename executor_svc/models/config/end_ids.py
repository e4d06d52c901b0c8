"""The token ids that mean something else than text by a folder's files: ends of texts, and images.

Ends are those of config.json, generation_config.json and the tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from executor_svc.models.folder import read_json, token_ids_of

FILES = ("config.json", "generation_config.json")
_EOS = "eos_token_id"
_MEDIA = ("image", "audio", "video")
_TOKENIZER_CONFIG, _TOKENIZER = "tokenizer_config.json", "tokenizer.json"


def end_ids(folder: Path, files: dict[str, dict[str, Any]]) -> list[int]:
    """Return the ids, ascending; files: the content of FILES, as far as they are there. Raises LoaderError.

    The tokenizer's EOS is one of them, as in vLLM: the fine-tune of a base model for chats often names its end there
    alone. A config.json of a model for images, without any, has those of its `text_config`, as in transformers.
    """
    own = _tokenizer_eos(folder)
    stated = {name: _text_part(content) for name, content in files.items()}
    return sorted({*token_ids_of(folder, stated, _EOS), *([] if own is None else [own])})


def _text_part(content: dict[str, Any]) -> dict[str, Any]:
    text = content.get("text_config")
    return text if content.get(_EOS) is None and isinstance(text, dict) else content


def media_ids(content: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the ids below vocab_size that stand for images, audio or video, ascending; content: of config.json."""
    found = (content.get(f"{kind}_token_{ending}") for kind in _MEDIA for ending in ("id", "index"))
    return tuple(sorted({each for each in found if type(each) is int and 0 <= each < vocab_size}))


def _tokenizer_eos(folder: Path) -> int | None:
    """Return the id of `eos_token` of tokenizer_config.json; None: there is none, or no file says its id."""
    config = read_json(folder, _TOKENIZER_CONFIG, required=False)
    text = _text_of(config.get("eos_token"))
    if text is None:
        return None
    decoder = config.get("added_tokens_decoder")
    for token_id, token in decoder.items() if isinstance(decoder, dict) else ():
        if _text_of(token) == text and token_id.isdecimal():
            return int(token_id)
    return _id_in_tokenizer(read_json(folder, _TOKENIZER, required=False), text)


def _id_in_tokenizer(content: dict[str, Any], text: str) -> int | None:
    """Return the id of a token in the content of tokenizer.json."""
    added, model = content.get("added_tokens"), content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = [token.get("id") for token in added or () if _text_of(token) == text] if isinstance(added, list) else []
    found += [vocabulary.get(text)] if isinstance(vocabulary, dict) else []
    return next((token_id for token_id in found if type(token_id) is int and token_id >= 0), None)


def _text_of(token: object) -> str | None:
    """Return the text of a token: itself, or the content of an AddedToken."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
