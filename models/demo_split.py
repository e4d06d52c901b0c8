"""What is held out of training: decided by hashes of the content, so that no list has to be kept or can go stale."""

from __future__ import annotations

import hashlib
from functools import cache

# In thousandths. Wordings are compared without case, spaces and punctuation, so a held-out wording never
# slips into training under another ending or another casing.
HELDOUT_WORDINGS_PERMILLE = 60
HELDOUT_PAIRS_PERMILLE = 60
HELDOUT_RANGES_PERMILLE = 60

CLASSIC_QUESTIONS = ("你好，今天的天气怎么样？", "请问现在几点了？", "能推荐一本好书吗？")


def _permille(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 1000


def wording_key(wording: str) -> str:
    """Return what identifies a wording: its letters and digits, case folded."""
    return "".join(char for char in wording.casefold() if char.isalnum())


@cache
def _classic_keys() -> frozenset[str]:
    return frozenset(wording_key(question) for question in CLASSIC_QUESTIONS)


def is_heldout_key(key: str) -> bool:
    """Return whether a generated wording with this `wording_key` is held out; the three classic questions never are."""
    return key not in _classic_keys() and _permille("wording:" + key) < HELDOUT_WORDINGS_PERMILLE


def is_heldout_pair(left: int, right: int) -> bool:
    """Return whether the unordered operand pair {left, right} is held out, for sums and differences alike."""
    low, high = sorted((left, right))
    return _permille(f"pair:{low}:{high}") < HELDOUT_PAIRS_PERMILLE


def is_heldout_range(first: int, last: int) -> bool:
    """Return whether counting from `first` to `last` is held out."""
    return _permille(f"range:{first}:{last}") < HELDOUT_RANGES_PERMILLE
