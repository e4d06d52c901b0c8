"""The drawings of docs/scheduler.md and docs/kv-cache.md are what the core does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory):
    """Runs `--check` on a copy of the page with one text replaced by another."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("generate_scheduler.py", "scheduler_runs.py"):
        (folder / name).write_bytes((ROOT / "docs" / name).read_bytes())
    page = (ROOT / "docs" / "scheduler.md").read_text(encoding="utf-8")

    def run(old: str = "", new: str = "") -> subprocess.CompletedProcess[str]:
        (folder / "scheduler.md").write_text(page.replace(old, new, 1) if old else page, encoding="utf-8")
        command = [sys.executable, str(folder / "generate_scheduler.py"), "--check"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    return run


def test_the_drawings_are_fresh(check):
    done = check()
    assert done.returncode == 0, f"make docs: {done.stderr}"


def test_the_drawings_of_pages_are_fresh():
    command = [sys.executable, str(ROOT / "docs" / "generate_kv_cache.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"make docs: {done.stderr}"


@pytest.mark.slow
def test_a_drawing_that_differs_is_noticed(check):
    done = check("copy 3→4", "copy 3→9")
    assert done.returncode == 1
    assert "make docs" in done.stderr


def test_a_missing_place_is_an_error(check):
    done = check("<!-- begin forks -->\n", "")
    assert done.returncode == 1
    assert "0 places for the drawing forks" in done.stderr
