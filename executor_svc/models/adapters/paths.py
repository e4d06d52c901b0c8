"""Which folders adapters may be read from. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from executor_svc.models.folder import LoaderError

CONFIG_FILE = "adapter_config.json"
"""Of an adapter's folder, in the form of PEFT."""


def allowed_folder(path: str | Path, roots: Sequence[Path]) -> Path:
    """Return a folder without symbolic links or `..` in its path, if it is one of the roots or lies below one.

    A relative path is one of the process's working directory, never of a root. Roots that do not exist allow nothing.
    Raises LoaderError; for a path outside of the roots its message does not say what is there.
    """
    found = _resolved(path, roots)
    if found is None or not found.is_dir():
        raise LoaderError(f"{path}: not a folder below {_shown(roots)}")
    return found


def is_missing(path: str | Path, roots: Sequence[Path]) -> bool:
    """Return whether nothing is at a path that lies below one of the roots; False for all other paths."""
    try:
        found = Path(path).expanduser().resolve()
        return not found.exists() and any(found.is_relative_to(root.expanduser().resolve()) for root in roots)
    except (OSError, RuntimeError, ValueError):
        return False


def allowed_file(folder: Path, name: str, roots: Sequence[Path] | None) -> Path:
    """Return a file of a folder, without symbolic links in its path; roots as in `allowed_folder`, None: anywhere.

    A link may lead out of the folder (the Hugging Face cache is made of such links), but not out of the roots. Raises
    LoaderError.
    """
    path = folder / name
    if roots is None:
        return path
    found = _resolved(path, roots)
    if found is None:
        raise LoaderError(f"{name}: not a file below {_shown(roots)}")
    return found


def _resolved(path: str | Path, roots: Sequence[Path]) -> Path | None:
    """Return an existing path without links, None if it is outside of the roots or not there."""
    try:
        found = Path(path).expanduser().resolve(strict=True)
        bounds = [root.expanduser().resolve() for root in roots]
    except (OSError, RuntimeError, ValueError):  # not there, a circle of links, or no path at all
        return None
    return found if any(found.is_relative_to(bound) for bound in bounds) else None


def _shown(roots: Sequence[Path]) -> str:
    return ", ".join(map(str, roots)) or "any folder: none is allowed"
