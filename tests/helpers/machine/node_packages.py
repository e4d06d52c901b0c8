"""Packages of Node by npm, for programs that the tests run."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

NO_NETWORK = re.compile(
    r"^npm error (?:code|errno) (ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ENETUNREACH|EHOSTUNREACH|ETIMEDOUT|"
    r"ERR_SOCKET_TIMEOUT|EIDLETIMEOUT|FETCH_ERROR|ENOTCACHED)$",
    re.MULTILINE,
)


def npm_ci(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Install what the folder's lock file names."""
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)


def need_node() -> None:
    """Skip the test where there is no Node."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no node")


def with_packages(folder: Path) -> Path:
    """The same folder with its packages; skips the test if the registry cannot be reached, and for no other reason."""
    result = npm_ci(folder)
    no_network = NO_NETWORK.search(result.stderr)
    if result.returncode != 0 and no_network:
        pytest.skip(f"npm cannot reach its registry: {no_network[1]}")
    assert result.returncode == 0, result.stderr
    return folder
