"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_SURE = 0.85  # similarity of a name and its misspelling; names of different options are less similar


def misspelling_of(name: str, known: Collection[str]) -> str:
    """The known name that this name clearly misspells; empty if there is none."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_SURE)), "")


def suggestion(name: str, known: Collection[str], prefix: str = "") -> str:
    """The end of a sentence about an unknown name: similar known names; empty if there are none.

    A `prefix` that all names share does not count as similarity.
    """
    bare, given = {other.removeprefix(prefix) for other in known}, name.removeprefix(prefix)
    close = difflib.get_close_matches(given, sorted(bare), n=3, cutoff=0.6)
    if close and _likeness(given, close[0]) >= _SURE:  # the others are no candidates then
        close = close[:1]
    return f"; did you mean {' or '.join(prefix + other for other in close)}?" if close else ""


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, name).ratio()
