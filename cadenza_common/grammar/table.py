"""The table of a tokenizer's tokens as bytes, from which masks are computed, and its digest.

Scheduler and executor each make it from the same file of the tokenizer, `tokenizer.json` or a GGUF file's metadata, and
compare digests.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza_common.gguf.file import find_gguf, read_gguf
from cadenza_common.gguf.tokenizer import has_tokenizer, tokenizer_digest, tokenizer_json

_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class GrammarEngine:
    """What a grammar's masks depend on besides the grammar: the library's version, and the tokens."""

    library: str
    """Name and version, as "llguidance 1.9.1"."""
    table_digest: bytes
    """SHA-256 over the tokenizer's file, the vocabulary size and the EOS ids, 32 bytes."""

    @property
    def key(self) -> bytes:
        """Equal for engines that make equal masks; not empty."""
        return self.library.encode() + b" " + self.table_digest


@dataclass(frozen=True, slots=True)
class TableSource:
    """What a table is made from."""

    path: Path
    """The tokenizer's file: its tokenizer.json, or a GGUF file."""
    vocab_size: int
    """Of the model; it may be larger than the tokenizer's."""
    eos_token_ids: tuple[int, ...]

    def engine(self) -> GrammarEngine:
        """Return what identifies the masks of this table; raises OSError, PackageNotFoundError, GgufError."""
        sha = hashlib.sha256(
            tokenizer_digest(read_gguf(self.path).metadata) if self._is_gguf else self.path.read_bytes()
        )
        sha.update(repr((self.vocab_size, sorted(self.eos_token_ids))).encode())
        return GrammarEngine(f"llguidance {importlib.metadata.version('llguidance')}", sha.digest())

    def table(self) -> Any:
        """Return the table, an `llguidance.LLTokenizer`; takes about a second for 131,072 tokens.

        Raises ValueError or OSError for a file that cannot be read, or not by llguidance.
        """
        import llguidance

        text = tokenizer_json(read_gguf(self.path).metadata) if self._is_gguf else self.path.read_text(encoding="utf-8")
        content = json.loads(text)
        added = content.get("added_tokens", [])
        kept = [token for token in added if token["id"] < self.vocab_size]
        if len(kept) < len(added):  # the model has no place for the others, so that it never chooses them
            text = json.dumps({**content, "added_tokens": kept})
        return llguidance.LLTokenizer(text, n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids))

    @property
    def _is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"


def table_source(tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> TableSource | None:
    """Return the source of a tokenizer's table; None without llguidance, the tokenizer's file or an EOS id.

    tokenizer: a folder, a GGUF file, or a hub id whose files are in the cache. Raises GgufError.
    """
    if not tokenizer or not eos_token_ids or importlib.util.find_spec("llguidance") is None:
        return None
    path = _file_of(tokenizer)
    return None if path is None else TableSource(path, vocab_size, tuple(sorted(eos_token_ids)))


def _file_of(tokenizer: str) -> Path | None:
    source = Path(tokenizer)
    if (source / _FILE).is_file():
        return source / _FILE
    if not source.exists():
        return _cached(tokenizer)
    gguf = find_gguf(source)
    return gguf if gguf is not None and has_tokenizer(read_gguf(gguf).metadata) else None


def _cached(hub_id: str) -> Path | None:
    """Return the tokenizer's file of a hub id in the cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(hub_id, _FILE)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
