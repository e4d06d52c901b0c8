"""Pointers of Git LFS: what `git clone` leaves in a file's place where Git LFS is not installed."""

from __future__ import annotations

from pathlib import Path

LFS_WORDS = "a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder"
_BEGINNING = b"version https://git-lfs.github.com/spec/"
_MOST_BYTES = 1024
"""A pointer has fewer, by the specification of Git LFS."""


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is a pointer of Git LFS; raises OSError."""
    if not path.is_file() or path.stat().st_size >= _MOST_BYTES:
        return False
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING
