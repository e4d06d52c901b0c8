"""The Node programs in examples/node and on docs/callers.md, against a real server."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.examples import EXAMPLES, one, run
from tests.helpers.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_NO_NETWORK = re.compile(
    r"^npm error (?:code|errno) (ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ENETUNREACH|EHOSTUNREACH|ETIMEDOUT|"
    r"ERR_SOCKET_TIMEOUT|EIDLETIMEOUT|FETCH_ERROR|ENOTCACHED)$",
    re.MULTILINE,
)


def npm_ci(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture(scope="module")
def node_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of examples/node, in a folder that is laid out as the repository is."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no node")
    root = tmp_path_factory.mktemp("checkout")
    (root / "protos").symlink_to(ROOT / "protos")
    folder = root / "examples" / "node"
    shutil.copytree(EXAMPLES / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    return folder


@pytest.fixture(scope="module")
def node_folder(node_sources: Path) -> Path:
    """The same with its packages, by the committed lock file."""
    result = npm_ci(node_sources)
    no_network = _NO_NETWORK.search(result.stderr)
    if result.returncode != 0 and no_network:
        pytest.skip(f"npm cannot reach its registry: {no_network[1]}")
    assert result.returncode == 0, result.stderr
    return node_sources


def test_only_a_missing_network_is_taken_for_one(node_sources: Path, tmp_path: Path) -> None:
    """Otherwise a broken example could pass as skipped."""
    shutil.copytree(node_sources, tmp_path / "node", ignore=shutil.ignore_patterns("node_modules"))
    offline = ("--cache", str(tmp_path / "cache"), "--fetch-retries", "0", "--registry", "http://127.0.0.1:9")
    refused = npm_ci(tmp_path / "node", *offline)
    assert refused.returncode != 0
    assert _NO_NETWORK.search(refused.stderr), refused.stderr
    (tmp_path / "node" / "package-lock.json").unlink()
    broken = npm_ci(tmp_path / "node", *offline)
    assert broken.returncode != 0
    assert not _NO_NETWORK.search(broken.stderr), broken.stderr


def test_node_gets_the_same_text(target: str, answers: dict[str, str], node_folder: Path) -> None:
    for prompt, answer in answers.items():
        assert run("node", "generate.js", target, prompt, cwd=node_folder) == answer + "\n"


def test_the_node_program_of_the_page(target: str, node_folder: Path) -> None:
    block = one("js run")
    (node_folder / "page.js").write_text(block.text)
    assert run("node", "page.js", target, cwd=node_folder) == block.expected
