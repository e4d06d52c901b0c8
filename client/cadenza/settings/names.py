"""Names of options, and suggestions for unknown ones."""

from __future__ import annotations

import difflib
from collections.abc import Collection

ENV_PREFIX = "CADENZA_"

_SURE = 0.85  # similarity of a name and its misspelling; names of different options are less similar


def variable(name: str) -> str:
    """The environment variable of an option."""
    return f"{ENV_PREFIX}{name.upper()}"


def flag(name: str) -> str:
    """The option as written on a command line."""
    return f"--{name.replace('_', '-')}"


def misspelling_of(name: str, known: Collection[str]) -> str:
    """The known name that this name clearly misspells; empty if there is none."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_SURE)), "")


def suggestion(name: str, known: Collection[str]) -> str:
    """The end of a sentence about an unknown name: similar known names; empty if there are none.

    If all names are variables, the shared prefix does not count as similarity.
    """
    prefix = ENV_PREFIX if name.upper().startswith(ENV_PREFIX) else ""
    bare = [other.removeprefix(prefix) for other in known]
    close = difflib.get_close_matches(name.upper().removeprefix(prefix) if prefix else name, bare, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(prefix + other for other in close)}?" if close else ""
