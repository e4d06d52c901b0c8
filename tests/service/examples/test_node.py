"""The Node programs in examples/node and node-stubs and on docs/callers.md, against a real server."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.examples import EXAMPLES, REFUSED_TOP_P, one, run
from tests.helpers.machine.node_packages import NO_NETWORK, need_node, npm_ci, with_packages
from tests.helpers.paths import ROOT
from tests.helpers.services import connection

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def node_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is laid out as the repository is, with copies of the examples in Node."""
    need_node()
    root = tmp_path_factory.mktemp("checkout")
    (root / "protos").symlink_to(ROOT / "protos")
    for name in ("node", "node-stubs"):
        without = shutil.ignore_patterns("node_modules", "gen")
        shutil.copytree(EXAMPLES / name, root / "examples" / name, ignore=without)
    return root / "examples"


@pytest.fixture(scope="module")
def node_folder(node_sources: Path) -> Path:
    return with_packages(node_sources / "node")


@pytest.fixture(scope="module")
def stubs_folder(node_sources: Path) -> Path:
    """With its stubs made, by the buf of this environment."""
    folder = with_packages(node_sources / "node-stubs")
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run("env", f"PATH={search}", "npm", "run", "stubs", cwd=folder)
    return folder


def test_only_a_missing_network_is_taken_for_one(node_sources: Path, tmp_path: Path) -> None:
    """Otherwise a broken example could pass as skipped."""
    shutil.copytree(node_sources / "node", tmp_path / "node", ignore=shutil.ignore_patterns("node_modules"))
    offline = ("--cache", str(tmp_path / "cache"), "--fetch-retries", "0", "--registry", "http://127.0.0.1:9")
    refused = npm_ci(tmp_path / "node", *offline)
    assert refused.returncode != 0
    assert NO_NETWORK.search(refused.stderr), refused.stderr
    (tmp_path / "node" / "package-lock.json").unlink()
    broken = npm_ci(tmp_path / "node", *offline)
    assert broken.returncode != 0
    assert not NO_NETWORK.search(broken.stderr), broken.stderr


def test_node_gets_the_same_text(target: str, answers: dict[str, str], node_folder: Path) -> None:
    for prompt, answer in answers.items():
        assert run("node", "generate.js", target, prompt, cwd=node_folder) == answer + "\n"


async def test_node_gets_the_same_texts_by_generated_stubs(
    target: str, answers: dict[str, str], stubs_folder: Path
) -> None:
    for prompt, answer in answers.items():
        lines = run("node", "generate.js", target, prompt, cwd=stubs_folder).splitlines()
        assert lines == [answer, f"[InvalidArgument] {REFUSED_TOP_P}", "[Canceled]", "[DeadlineExceeded]"]
    async with connection(target) as running:
        await running.wait_until_free()


def test_the_node_program_of_the_page(target: str, node_folder: Path) -> None:
    block = one("js run")
    (node_folder / "page.js").write_text(block.text)
    assert run("node", "page.js", target, cwd=node_folder) == block.expected
