"""What is made once in a run of the tests, and kept for all of its workers until it ends."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

_FOLDER = "_TESTS_KEPT_FOLDER"


def begin_run() -> None:
    """By the first process of a run, before its workers start."""
    os.environ.setdefault(_FOLDER, tempfile.mkdtemp(prefix="cadenza-tests-"))


def end_run() -> None:
    """By the first process of a run, after its workers have ended."""
    shutil.rmtree(os.environ.pop(_FOLDER), ignore_errors=True)


def kept_copy(folder: Path, wanted: object, make: Callable[[Path], None]) -> None:
    """Fill a folder with what `make` makes in one; called once for equal `wanted` in a run, as far as their repr says.

    Outside a run nothing is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if _FOLDER not in os.environ:
        make(folder)
        return
    kept = Path(os.environ[_FOLDER]) / hashlib.sha256(repr(wanted).encode()).hexdigest()
    if not kept.exists():
        made = Path(tempfile.mkdtemp(dir=kept.parent))
        make(made)
        made.chmod(0o755)
        try:
            made.rename(kept)
        except OSError:  # another worker was first
            shutil.rmtree(made)
    shutil.copytree(kept, folder, dirs_exist_ok=True)
