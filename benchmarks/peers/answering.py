"""A peer's side of the line protocol. Standard library only: it runs under the peer's interpreter."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def answering() -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yields a function that sends an answer, one JSON line on stdout. Other output goes to stderr meanwhile."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        yield lambda found: print(json.dumps(found), file=out, flush=True)
