"""Examples skip for missing packages alone: a broken example must not pass as skipped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers import examples


def test_a_package_that_does_not_exist_is_missing() -> None:
    installed = [] if shutil.which("dpkg-query") is None else ["dpkg"]
    assert examples.missing_packages([*installed, "no-such-package"]) == ["no-such-package"]


def test_the_skip_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sources(tmp_path, monkeypatch, packages="no-such-package nor-this", build="exit 0")
    with pytest.raises(pytest.skip.Exception, match="no-such-package nor-this"):
        examples.build("language", folder)


def test_an_example_that_does_not_compile_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sources(tmp_path, monkeypatch, packages="", build="echo 'a compile error' >&2; exit 1")
    with pytest.raises(AssertionError, match="a compile error"):
        examples.build("language", folder)


def sources(folder: Path, monkeypatch: pytest.MonkeyPatch, *, packages: str, build: str) -> Path:
    """An examples/ folder with one language."""
    monkeypatch.setattr(examples, "EXAMPLES", folder)
    (folder / "language").mkdir()
    (folder / "language" / "debian-packages.txt").write_text(packages)
    (folder / "language" / "build.sh").write_text(build)
    return folder / "out"
