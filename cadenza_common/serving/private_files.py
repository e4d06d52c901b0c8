"""Files that hold prompts, outputs or their tokens are their owner's alone, whatever the umask is."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def open_private(path: str, flags: int) -> int:
    """An opener, as `open` takes one: a file that it creates has mode 0600."""
    return os.open(path, flags, 0o600)


def make_private(path: Path | str) -> None:
    """Give a file that is there mode 0600: it may be older than this rule, or a copy. That of another user stays."""
    with contextlib.suppress(OSError):
        os.chmod(path, 0o600)
