"""Adapters are read from allowed folders alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from executor_svc.models.adapters.paths import allowed_file, allowed_folder, is_missing
from executor_svc.models.folder import LoaderError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root with adapter a, links into and out of it, beside a folder that is not allowed."""
    for name in ("root/a", "root-2/secret", "snapshots"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "root-2" / "secret" / "file").write_text("x")
    root = tmp_path / "root"
    (root / "inside").symlink_to(root / "a")
    (root / "outside").symlink_to(tmp_path / "root-2" / "secret")
    (root / "circle").symlink_to(root / "circle")
    (root / "a" / "leak").symlink_to(tmp_path / "root-2" / "secret" / "file")
    (root / "a" / "own").write_text("y")
    (root / "a" / "blob").symlink_to(root / "a" / "own")
    return root


@pytest.mark.parametrize("path", ["a", "inside", ".", "../root/a", "a/../inside"])
def test_folders_below_a_root_are_found_without_links(root: Path, path: str) -> None:
    found = allowed_folder(root / path, [root.parent / "none", root])
    assert found == (root if path == "." else root / "a")


@pytest.mark.parametrize(
    "path",
    ["outside", "..", "../root-2", "../root-2/secret", "a/../../root-2", "none", "circle", "a/own", "a\0", "/etc"],
)
def test_other_folders_are_refused_alike(root: Path, path: str) -> None:
    given = os.path.join(root, path)
    with pytest.raises(LoaderError) as refused:
        allowed_folder(given, [root])
    shown = given.replace("\0", "\\x00")
    assert str(refused.value) == f"{shown}: not a folder below {root}"


@pytest.mark.parametrize(
    ("path", "missing"),
    [
        ("none", True), ("a/none", True), ("inside/none", True), ("a", False), ("a/own", False), ("outside", False),
        ("outside/none", False), ("../root-2/none", False), ("circle", False), ("a\0", False),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_of_paths_below_a_root_alone(root: Path, path: str, missing: bool) -> None:
    assert is_missing(os.path.join(root, path), [root]) is missing


def test_without_roots_nothing_is_allowed(root: Path) -> None:
    with pytest.raises(LoaderError, match="none is allowed"):
        allowed_folder(root, [])


def test_a_link_as_root_is_the_folder_that_it_leads_to(root: Path) -> None:
    assert allowed_folder(root / "a", [root / "inside"]) == root / "a"


def test_links_of_files_stay_below_the_roots(root: Path) -> None:
    assert allowed_file(root / "a", "blob", [root]) == root / "a" / "own"
    with pytest.raises(LoaderError, match=f"leak: not a file below {root}"):
        allowed_file(root / "a", "leak", [root])
    assert allowed_file(root / "a", "leak", None).read_text() == "x"
