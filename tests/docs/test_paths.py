"""Files, folders and modules that documents name in code spans are there."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests.helpers.paths import PACKAGES, ROOT

_PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_TOPS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} - {"dist"}
_SUFFIXES = {".md", ".proto", ".py", ".sh", ".toml"}
_ELSEWHERE = {
    "google/rpc/error_details.proto": "Google's",
    "google/rpc/status.proto": "Google's; the copy of it lies in protos/",
    "benchmarks/scratch/gpu/": "the benchmarks of the GPU make it",
}


@functools.cache
def _files() -> frozenset[str]:
    """Every file of the repository, by each end of its path: a document may leave out the folders before."""
    files = [path.relative_to(ROOT).parts for top in _TOPS for path in ROOT.joinpath(top).rglob("*.*")]
    files += [(path.name,) for path in ROOT.iterdir()]
    return frozenset("/".join(parts[start:]) for parts in files for start in range(len(parts)))


def _is_there(path: str, page: Path) -> bool:
    if path.split("/")[0] in _TOPS - {"models"} and "/" in path:  # executor_svc has models too
        return any(list(base.glob(path)) for base in (ROOT, ROOT / "tests"))  # pages of tests leave out `tests/`
    return Path(path).suffix not in _SUFFIXES or path in _files() or (page.parent / path).exists()


def _module_is_there(name: str) -> bool:
    """Whether it is a module or a package, or a name in one."""
    first, *parts = name.split(".")
    path = PACKAGES.get(first, ROOT) / first
    for part in parts:
        if not path.is_dir():
            return part in path.with_suffix(".py").read_text(encoding="utf-8")
        inside = path / part
        if not inside.is_dir() and not inside.with_suffix(".py").is_file():
            return part in (path / "__init__.py").read_text(encoding="utf-8")
        path = inside
    return True


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_and_modules_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M))
    paths = {span.split("::")[0] for span in spans if re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?(::\w+)?", span)}
    missing = [path for path in paths - set(_ELSEWHERE) if "NAME" not in path and not _is_there(path, page)]
    assert not missing
    packages = "|".join(set(PACKAGES) - {"cadenza"} | {"benchmarks"})
    named = {
        *re.findall(rf"`((?:{packages})(?:\.\w+)+)`", text),
        *re.findall(rf"-m ((?:{packages}|tests)(?:\.\w+)*)", text),
    }
    assert not [name for name in named if not _module_is_there(name)]
