"""Tenants files with tokens that tests know, and calls that carry them."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_numbers = itertools.count()


def token(name: str, number: int = 0) -> str:
    """A tenant's token of this number."""
    return f"cadenza_token-{number}-of-{name}"


def hash_of(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def bearer(name: str, number: int = 0) -> tuple[tuple[str, str], ...]:
    """Call metadata with that token."""
    return (("authorization", f"Bearer {token(name, number)}"),)


def write_tenants(path: Path, tenants: Mapping[str, Mapping[str, Any]]) -> str:
    """Replace the file at once. A tenant without `tokens` has its token 0; `tokens` holds numbers of tokens."""
    lines = []
    for name, keys in tenants.items():
        hashes = [hash_of(token(name, number)) for number in keys.get("tokens", [0])]
        lines += [f"[tenants.{name}]", f"tokens = {hashes!r}"]
        lines += [f"{key} = {_toml(value)}" for key, value in keys.items() if key != "tokens"]
    new = path.with_name(f".new-{next(_numbers)}")
    new.write_text("\n".join(lines) + "\n")
    os.replace(new, path)
    return str(path)


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
