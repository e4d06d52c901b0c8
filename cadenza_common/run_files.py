"""Files that say what a living process of this user does; those that dead processes left behind are removed.

They lie in ~/.cache/cadenza, or below XDG_CACHE_HOME. What is written is help to others: no error stops the writer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_numbers = itertools.count()


def cache_folder() -> Path:
    """Return the folder of this user for what Cadenza keeps; it may be missing."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cadenza"


def write_run(kind: str, content: Mapping[str, Any]) -> Path | None:
    """Write a file of this process; returns its path, to be removed at the end, or None if it cannot be written."""
    import psutil

    pid, folder = os.getpid(), cache_folder() / kind
    path = folder / f"{pid}-{next(_numbers)}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps({**content, "pid": pid, "created": psutil.Process(pid).create_time()}))
        new.replace(path)
    except OSError:
        return None
    return path


def read_runs(kind: str) -> Iterator[dict[str, Any]]:
    """Yield what living processes have written, each with `pid` and `created`, the time of its start."""
    import psutil

    folder = cache_folder() / kind
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_text())
            with contextlib.suppress(psutil.NoSuchProcess):
                if abs(psutil.Process(content["pid"]).create_time() - content["created"]) < 1:
                    yield content
                    continue
            path.unlink()


def remove_run(path: Path | None) -> None:
    """Remove a file of `write_run`."""
    with contextlib.suppress(OSError):
        if path is not None:
            path.unlink()
