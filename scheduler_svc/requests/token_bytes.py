"""Bytes of tokens that are no text of their own, as a part of a character is none, by their names in the vocabulary."""

from __future__ import annotations

import re

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""Of sentencepiece models with byte fallback."""
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted(set(range(0x100)).difference(_PRINTABLE))
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + at): byte for at, byte in enumerate(_OTHERS)}
"""The letters in which byte-level vocabularies write bytes (https://github.com/openai/gpt-2/blob/master/src/encoder.py)."""


def is_byte_token(name: str) -> bool:
    """Whether a token of a sentencepiece model stands for a byte."""
    return _BYTE_TOKEN.fullmatch(name) is not None


def bytes_of_token(name: str, text: str) -> bytes:
    """The bytes of a token whose text has U+FFFD where they are no UTF-8; nothing: its name does not say them."""
    found = _BYTE_TOKEN.fullmatch(name)
    if found is not None:
        return bytes.fromhex(found[1])
    if any(char not in _BYTE_OF for char in name):
        return b""
    raw = bytes(_BYTE_OF[char] for char in name)
    return raw if raw.decode(errors="replace") == text else b""
