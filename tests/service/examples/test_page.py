"""docs/callers.md: its excerpts are in the files, its commands exist, its table has every example."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.helpers.examples import EXAMPLES, blocks, one, run
from tests.helpers.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_page_has_no_other_kind_of_block() -> None:
    assert {block.info for block in blocks()} == {"sh", "sh run", "python", "js", "js run", "java", "go"}


def test_excerpts_are_what_the_examples_say() -> None:
    python = "\n".join(path.read_text() for path in EXAMPLES.glob("*.py"))
    files = {"java": "java/Generate.java", "go": "go/main.go"}
    node = "\n".join((EXAMPLES / name / "generate.js").read_text() for name in ("node", "node-stubs"))
    sources = {"python": python, "js": node} | {kind: (EXAMPLES / path).read_text() for kind, path in files.items()}
    for block in blocks():
        if block.info in sources:
            assert block.text in sources[block.info]


def test_the_descriptor_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    run("bash", "-e", "-c", one("sh run").text, cwd=tmp_path)
    for name in ("cadenza.binpb", "cadenza.pb"):
        files = FileDescriptorSet.FromString((tmp_path / name).read_bytes()).file
        assert {"cadenza/v1/generation.proto", "google/rpc/status.proto"} <= {file.name for file in files}


def test_the_commands_of_the_page_exist() -> None:
    """Examples are called by a path that is there, with options that they have."""
    text = "".join(block.text for block in blocks() if block.info == "sh")
    for path, options in re.findall(r"python (examples/\S+)((?: --\S+ \S+)*)", text):
        usage = run(sys.executable, ROOT / path, "--help")
        for option in re.findall(r"--\S+", options):
            assert option in usage
    for path in re.findall(r"examples/\S+\.(?:sh|txt)", text):
        assert (ROOT / path).is_file()
        assert path.endswith(".txt") or os.access(ROOT / path, os.X_OK)
    for folder in re.findall(r"cd (\S+) && npm ci", text):
        assert (ROOT / folder / "package-lock.json").is_file()


def test_the_table_has_every_example() -> None:
    page = (ROOT / "docs" / "callers.md").read_text()
    table = page[: page.index("\n## ")]
    linked = {path.split("/")[0] for path in re.findall(r"\]\(\.\./examples/([^)]+)\)", table)}
    assert linked == {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"}
    for path in re.findall(r"\]\(\.\./(examples/[^)]+)\)", page):
        assert (ROOT / path).is_file()
