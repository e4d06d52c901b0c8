"""How the tests run the programs in examples/: as a stranger would, as processes."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

EXAMPLES = ROOT / "examples"
PROMPT = "What is 27 + 48?"
REFUSED_TOP_P = "sampling_params.top_p: must be over 0 and at most 1, not 2.0"


def run(*command: str | Path, cwd: Path = ROOT, timeout_s: float = 120) -> str:
    """What a program prints; it must end well."""
    result = subprocess.run(command, cwd=cwd, capture_output=True, check=False, timeout=timeout_s)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def missing_packages(packages: list[str]) -> list[str]:
    """Those Debian packages that are not installed here; elsewhere than on Debian, all."""
    if shutil.which("dpkg-query") is None:
        return packages
    query = ["dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\\n", *packages]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    installed = set(re.findall(r"^(\S+) installed$", found.stdout, re.MULTILINE))
    return [package for package in packages if package not in installed]


def build(language: str, folder: Path) -> None:
    """Compile the example into `folder`; skips the test if Debian packages are missing, and for no other reason."""
    missing = missing_packages((EXAMPLES / language / "debian-packages.txt").read_text().split())
    if missing:
        pytest.skip(f"Debian packages are not installed: {' '.join(missing)}")
    run("bash", EXAMPLES / language / "build.sh", folder, timeout_s=240)


@dataclass(frozen=True)
class Block:
    """A fenced block of the page; `expected` is the ```text block right after it."""

    info: str
    text: str
    expected: str | None


def blocks() -> list[Block]:
    """The fenced blocks of docs/callers.md."""
    page = (ROOT / "docs" / "callers.md").read_text()
    fenced = re.compile(r"^```([^\n]+)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
    return [Block(*found.groups()) for found in fenced.finditer(page)]


def one(info: str) -> Block:
    """The only block of its kind."""
    (block,) = (block for block in blocks() if block.info == info)
    return block
