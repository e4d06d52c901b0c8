"""What is made once in a run of the tests, and kept for all of its workers until it ends."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

_FOLDER = "_TESTS_KEPT_FOLDER"
_own: Path | None = None


def begin_run() -> None:
    """By each process of a run; the first one makes the folder, and those that it starts use it too.

    Each has a cache folder of its own: executors read there what others of this user have promised to their pools, and
    would not start where another worker, or a server beside the tests, has promised all of the memory.
    """
    global _own
    if _FOLDER not in os.environ:
        _own = Path(tempfile.mkdtemp(prefix="cadenza-tests-"))
        os.environ[_FOLDER] = str(_own)
        former = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ.setdefault("GOCACHE", str(former / "go-build"))  # what others keep there stays
        os.environ.setdefault("MPLCONFIGDIR", str(former / "matplotlib"))
        # transformers imports PyTorch's compiler, which sets it then, in the middle of a run.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_own / "torchinductor"))
    os.environ["XDG_CACHE_HOME"] = str(Path(os.environ[_FOLDER]) / f"cache-{os.getpid()}")


def end_run() -> None:
    """By each process of a run as it ends; the one that made the folder removes it."""
    if _own is not None:
        del os.environ[_FOLDER]
        shutil.rmtree(_own, ignore_errors=True)


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
