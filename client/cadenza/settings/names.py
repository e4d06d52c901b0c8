"""Names of options: what an unknown one may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection

ENV_PREFIX = "CADENZA_"

_SURE = 0.85  # as alike as a name and its misspelling; names of different options are less so


def variable(name: str) -> str:
    """The environment variable of an option."""
    return f"{ENV_PREFIX}{name.upper()}"


def flag(name: str) -> str:
    """The option as it stands on a command line."""
    return f"--{name.replace('_', '-')}"


def misspelling_of(name: str, known: Collection[str]) -> str:
    """The known name of which this one can only be a misspelling; empty if there is none."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_SURE)), "")


def suggestion(name: str, known: Collection[str]) -> str:
    """The end of a sentence about an unknown name: names that it may have meant; empty if there are none.

    All names may be variables: then what they share does not make them alike.
    """
    prefix = ENV_PREFIX if name.upper().startswith(ENV_PREFIX) else ""
    bare = [other.removeprefix(prefix) for other in known]
    close = difflib.get_close_matches(name.upper().removeprefix(prefix) if prefix else name, bare, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(prefix + other for other in close)}?" if close else ""
