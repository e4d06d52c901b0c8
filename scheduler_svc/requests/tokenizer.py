"""The model's tokenizer, from transformers, which is imported lazily, or from a GGUF file."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cadenza_common.brief import one_line
from cadenza_common.gguf.file import find_gguf
from cadenza_common.gguf.metadata import GgufError
from cadenza_common.gguf.tokenizer import load_gguf_tokenizer
from scheduler_svc.requests.chats.renderer import ChatRenderer, ChatSettings, templates_of
from scheduler_svc.requests.token_bytes import bytes_of_token, is_byte_token
from scheduler_svc.requests.tokenizer_files import problem_of

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

MAX_PROMPT_TOKENS = 128 * 1024
"""Limit of the tokens of a prompt: the list of so many ids is made in one call of 2.4 ms (docs/decisions/0025)."""
_INLINE_CHARS = 4096
"""Text up to this length is encoded on the event loop (well under 1 ms); longer text in a thread."""
_CHATS = ChatSettings()
MAX_ADDED_TOKENS = 4096
"""Added tokens that a model's description names."""
_MOST_REASON = 500
"""Characters of a message about a tokenizer that cannot be loaded."""
_FUSED = (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"])
"""Decoders of sentencepiece models with byte fallback, as Llama 2 and Gemma have."""
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "tekken.json")


class TokenizerError(Exception):
    """The tokenizer cannot be loaded or does not match the model; the message has the reason and a remedy."""


_HINT = "(--tokenizer names another, --skip-tokenizer-init none)"


class TooManyTokensError(Exception):
    """A text has more tokens than a prompt may have."""


def preload() -> None:
    """Import the modules that `load_tokenizer` needs; blocks for seconds."""
    with contextlib.suppress(ImportError):  # `load_tokenizer` raises, if it is needed
        importlib.import_module("transformers.models.auto.tokenization_auto")


def load_tokenizer(source: str, *, required: bool = False, chats: ChatSettings = _CHATS) -> Tokenizer | None:
    """Load from a folder, a GGUF file or a hub id; blocks for seconds. `check_fits` compares it with the model.

    Returns None if `source` is empty, or holds no tokenizer, unless `required`. Raises TokenizerError.
    """
    tokenizer = _load(source, required=required, chats=chats)
    if tokenizer is not None:
        tokenizer.chats.prepare()
    return tokenizer


def _load(source: str, *, required: bool, chats: ChatSettings) -> Tokenizer | None:
    if not source:
        return None
    folder = Path(source)
    gguf = _gguf_of(folder)
    if gguf is not None:
        return _load_from_gguf(gguf, source, required=required, chats=chats)
    if folder.is_dir() and not any((folder / name).exists() for name in _FILES):
        if required:
            raise TokenizerError(f"the folder {source!r} holds no tokenizer (none of {', '.join(_FILES)})")
        _LOG.warning("%s holds no tokenizer: token ids only", source)
        return None
    if not folder.is_dir() and (source.startswith(("/", ".", "~")) or source.count("/") > 1):
        raise TokenizerError(f"there is no folder {source!r} {_HINT}")
    problem = problem_of(folder)
    if problem is not None:
        raise TokenizerError(f"cannot load a tokenizer from {source!r}: {problem} {_HINT}")
    try:
        # Imported here: it takes seconds, and a service for token ids only does not need it.
        from transformers import AutoTokenizer

        # False, not the default: that asks on a terminal whether to run the folder's own code.
        inner = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as exc:
        raise TokenizerError(f"cannot load a tokenizer from {source!r}: {_reason(exc)} {_HINT}") from exc
    return Tokenizer(inner, source, chats)


def _reason(error: Exception) -> str:
    """Return why transformers failed, in a line: others' files stand in it, and may be its fault alone."""
    if isinstance(error, RecursionError):
        return "a file of it is nested too deeply"
    text = str(error).strip()
    is_spoken = isinstance(error, OSError | ValueError) or type(error) is Exception  # others are bugs that files show
    first = text.splitlines()[0] if text else ""
    return one_line(first if first and is_spoken else f"{type(error).__name__}: {first}", _MOST_REASON)


def _gguf_of(source: Path) -> Path | None:
    """Return the GGUF file with the tokenizer of a file or folder; None: there is none, or other files hold it."""
    if any((source / name).exists() for name in _FILES):
        return None
    try:
        return find_gguf(source)
    except GgufError as error:
        raise TokenizerError(f"cannot load a tokenizer: {error} {_HINT}") from error


def _load_from_gguf(path: Path, source: str, *, required: bool, chats: ChatSettings) -> Tokenizer | None:
    try:
        inner = load_gguf_tokenizer(path)
    except GgufError as error:
        raise TokenizerError(f"cannot load a tokenizer: {error} {_HINT}") from error
    if inner is not None:
        return Tokenizer(inner, source, chats)
    if required:
        raise TokenizerError(f"the file {str(path)!r} holds no tokenizer: its tokenizer.ggml.model is none")
    _LOG.warning("%s holds no tokenizer: token ids only", path)
    return None


@dataclass(frozen=True, slots=True)
class TokenizerAddedToken:
    """A token that stands for exactly one text."""

    token_id: int
    text: str
    special: bool
    """Whether it is left out with skip_special_tokens."""


class Tokenizer:
    """A transformers tokenizer. Methods are thread-safe; `run` moves long work off the event loop."""

    def __init__(self, inner: Any, source: str, chats: ChatSettings = _CHATS) -> None:
        self.source = source
        self._inner = inner
        self._fast: Any = inner.backend_tokenizer if getattr(inner, "is_fast", False) else None
        if self._fast is not None:
            # transformers does this before each call. Set once, so that threads never change shared state.
            self._fast.no_truncation()
            self._fast.no_padding()
        self.vocab_size = max(inner.get_vocab().values(), default=-1) + 1
        """The largest token id plus one."""
        self.special_ids = _special_ids(inner)
        templates = templates_of(chats.template or getattr(inner, "chat_template", None))
        self.chats = ChatRenderer(
            templates,
            _special_tokens(inner),
            trusts_requests=chats.trusts_requests,
            content_format=chats.content_format,
        )
        """Renders chats."""
        self.added_tokens = _added_tokens(inner)
        """In order of their ids, at most MAX_ADDED_TOKENS."""
        self._token_texts: dict[int, str] = {}
        self._anchor = _anchor(self._fast)
        self._fixed_texts: dict[int, str | None] = {}
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")

    def check_fits(self, model_vocab_size: int) -> None:
        """Check that the vocabulary matches the model's; raises TokenizerError. A larger model vocabulary is padding.

        Added tokens may exceed the model's vocabulary, as Gemma 3's <image_soft_token> does for its text models;
        `RequestBuilder` rejects prompts that contain one.
        """
        if self.vocab_size <= model_vocab_size:
            return
        added = getattr(self._inner, "added_tokens_decoder", None) or {}
        ids = [token_id for token_id in self._inner.get_vocab().values() if token_id >= model_vocab_size]
        if any(token_id not in added for token_id in ids):
            raise TokenizerError(
                f"the tokenizer {self.source!r} has token ids up to {max(ids)}, the model a vocabulary of "
                f"{model_vocab_size}: they do not belong together (--tokenizer names another)"
            )
        names = ", ".join(str(added[token_id]) for token_id in sorted(ids)[:3])
        _LOG.warning("%d added tokens are beyond the model's vocabulary: %s", len(ids), names)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of text, with special tokens such as BOS if the model has them.

        Raises TooManyTokensError for more than MAX_PROMPT_TOKENS.
        """
        if self._fast is None:
            token_ids = list(self._inner.encode(text, add_special_tokens=add_special_tokens))
            _check_count(len(token_ids))
            return token_ids
        # The batch form without offsets takes a quarter of the time, and releases the GIL.
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        _check_count(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; invalid UTF-8 becomes U+FFFD, ids without a token are skipped."""
        if self._fast is not None:
            if len(token_ids) > _INLINE_CHARS:
                # The batch form releases the GIL; the other one would hold it for 13 ms for 131,072 ids.
                (text,) = self._fast.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
                return str(text)
            return str(self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens))
        known = [token_id for token_id in token_ids if token_id < self.vocab_size]
        return str(
            self._inner.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, including special ones; a word's leading space is kept."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.decode([token_id], skip_special_tokens=False)
            piece = self._inner.convert_ids_to_tokens(token_id) if token_id < self.vocab_size else None
            if isinstance(piece, str) and piece.startswith("▁") and not text.startswith(" "):
                text = " " + text
            self._token_texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token whose text is not its own, as a part of a character; nothing: its text's."""
        text = self.token_text(token_id)
        if "\ufffd" not in text or token_id >= self.vocab_size:
            return b""
        return bytes_of_token(self._inner.convert_ids_to_tokens(token_id) or "", text)

    def fixed_text(self, token_id: int) -> str | None:
        """Return the text that a token adds after any text that ends with a complete character.

        None: the text depends on the neighbours, as that of a token with a part of a character; or the token is
        special; or the tokenizer's decoder is not among those whose tokens have texts of their own (`_anchor`).
        """
        try:
            return self._fixed_texts[token_id]
        except KeyError:
            found = self._fixed_texts[token_id] = self._find_fixed_text(token_id)
            return found

    def _find_fixed_text(self, token_id: int) -> str | None:
        if self._anchor is None or token_id in self.special_ids or token_id >= self.vocab_size:
            return None
        if is_byte_token(self._inner.convert_ids_to_tokens(token_id) or ""):
            return None
        before = self.decode([self._anchor])
        text = self.decode([self._anchor, token_id])
        return text[len(before) :] if text.startswith(before) and "\ufffd" not in text else None

    async def run(self, work: Callable[[], _T], num_chars: int) -> _T:
        """Run work on `num_chars` characters: on the event loop if it is short, otherwise in a thread."""
        if num_chars <= _INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    @staticmethod
    def is_short(num_chars: int) -> bool:
        """Return whether `run` would do the work on the event loop."""
        return num_chars <= _INLINE_CHARS

    def files(self) -> dict[str, bytes]:
        """Return its files by name, as transformers writes and loads them: no other file of the model. For a thread."""
        with tempfile.TemporaryDirectory(prefix="cadenza-tokenizer-") as folder:
            self._inner.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}

    def has_same_tokens(self, other: Tokenizer) -> bool:
        """Return whether each token id means the same token."""
        same: bool = self._inner.get_vocab() == other._inner.get_vocab()
        return same

    def retire(self) -> None:
        """End the threads once their queued work is done."""
        self.chats.close()
        self._pool.shutdown(wait=False)

    def close(self) -> None:
        """End the threads; running work is finished, queued work is dropped."""
        self.chats.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _check_count(num_tokens: int) -> None:
    if num_tokens > MAX_PROMPT_TOKENS:
        raise TooManyTokensError(f"has {num_tokens} tokens; at most {MAX_PROMPT_TOKENS} are allowed")


def _added_tokens(inner: Any) -> tuple[TokenizerAddedToken, ...]:
    added = getattr(inner, "added_tokens_decoder", None) or {}
    ids = sorted(map(int, added))[:MAX_ADDED_TOKENS]
    return tuple(
        TokenizerAddedToken(token_id, str(added[token_id].content), bool(added[token_id].special)) for token_id in ids
    )


def _special_tokens(inner: Any) -> dict[str, Any]:
    """Return the variables that templates read, such as bos_token: texts, or lists of them."""
    named = getattr(inner, "special_tokens_map", None) or {}
    return {
        name: [str(each) for each in value] if isinstance(value, (list, tuple)) else str(value)
        for name, value in named.items()
    }


def _special_ids(inner: Any) -> frozenset[int]:
    added = getattr(inner, "added_tokens_decoder", None) or {}
    special = {int(token_id) for token_id, token in added.items() if token.special}
    named = {int(token_id) for token_id in inner.all_special_ids if token_id is not None}
    if getattr(inner, "is_fast", False):
        named &= added.keys()  # others are in no decoder's list: a GGUF file may name a normal token
    return frozenset(special | named)


def _anchor(fast: Any) -> int | None:
    """Return a token with a text of its own, where the text of tokens is their texts, one after the other.

    So it is for byte-level decoders, where only bytes of a character belong together; for Metaspace, which drops a
    leading space at the start only; and for sentencepiece's decoder with byte fallback, apart from its byte tokens.
    """
    if fast is None or fast.decoder is None or not _joins_tokens(json.loads(fast.decoder.__getstate__())):
        return None
    for token_id in reversed(fast.encode("a", add_special_tokens=False).ids):
        if fast.decode([token_id], skip_special_tokens=False).strip() == "a":
            return int(token_id)
    return None


def _joins_tokens(decoder: Mapping[str, Any]) -> bool:
    if decoder["type"] != "Sequence":
        return decoder["type"] in ("ByteLevel", "Metaspace")
    parts = decoder["decoders"]
    return [part["type"] for part in parts] in _FUSED and all(
        part.get("stop", 0) == 0 and "Regex" not in part.get("pattern", {}) for part in parts
    )
