"""The table of a tokenizer's tokens as bytes, from which masks are computed, and its digest.

Scheduler and executor each make it from the same file of the tokenizer, `tokenizer.json`, and compare digests.
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
    """The tokenizer's file."""
    vocab_size: int
    """Of the model; it may be larger than the tokenizer's."""
    eos_token_ids: tuple[int, ...]

    def engine(self) -> GrammarEngine:
        """Return what identifies the masks of this table; raises OSError, PackageNotFoundError."""
        sha = hashlib.sha256(self.path.read_bytes())
        sha.update(repr((self.vocab_size, sorted(self.eos_token_ids))).encode())
        return GrammarEngine(f"llguidance {importlib.metadata.version('llguidance')}", sha.digest())

    def table(self) -> Any:
        """Return the table, an `llguidance.LLTokenizer`; takes about a second for 131,072 tokens.

        Raises ValueError or OSError for a file that llguidance cannot read.
        """
        import llguidance

        text = self.path.read_text(encoding="utf-8")
        content = json.loads(text)
        added = content.get("added_tokens", [])
        kept = [token for token in added if token["id"] < self.vocab_size]
        if len(kept) < len(added):  # the model has no place for the others, so that it never chooses them
            text = json.dumps({**content, "added_tokens": kept})
        return llguidance.LLTokenizer(text, n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids))


def table_source(tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> TableSource | None:
    """Return the source of a tokenizer's table; None without llguidance, the tokenizer's file or an EOS id.

    tokenizer: a folder, or a hub id whose files are in the cache.
    """
    if not tokenizer or not eos_token_ids or importlib.util.find_spec("llguidance") is None:
        return None
    folder = Path(tokenizer)
    path: Path | None = folder / _FILE
    if not folder.is_dir():
        path = None if folder.exists() else _cached(tokenizer)
    if path is None or not path.is_file():
        return None
    return TableSource(path, vocab_size, tuple(sorted(eos_token_ids)))


def _cached(hub_id: str) -> Path | None:
    """Return the tokenizer's file of a hub id in the cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(hub_id, _FILE)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
