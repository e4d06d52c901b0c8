"""The Python programs of documents, run as they stand there against both services on the demo model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza_launcher.local import LocalServices
from tests.helpers.paths import ROOT

ADDRESS = "127.0.0.1:50051"
PROGRAMS = {
    f"{page}-{number}": program
    for page in ("README.md", "docs/quickstart.md", "docs/debugging.md", "docs/questions.md")
    for number, program in enumerate(re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.S | re.M))
    if "langchain" not in program  # tests/clients/test_libraries.py runs it
}
WATCHES, READS_LOG = "docs/debugging.md-0", "docs/debugging.md-1"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the scheduler writes its plan log."""
    return tmp_path_factory.mktemp("recorded") / "bug.log"


@pytest.fixture(scope="module")
def target(log: Path) -> Iterator[str]:
    with LocalServices(ROOT / "models" / "cadenza-demo", num_gpu_blocks=256, record=str(log)) as services:
        yield services.target


def run(program: str, target: str, folder: Path = ROOT) -> str:
    """What a program prints."""
    environment = {**os.environ, "PYTHONWARNINGS": "error", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}
    done = subprocess.run(
        [sys.executable, "-c", program.replace(ADDRESS, target)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    return done.stdout


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in (WATCHES, READS_LOG)])
def test_program_runs(name: str, target: str) -> None:
    printed = run(PROGRAMS[name], target)
    if "12+34=" in PROGRAMS[name]:
        assert "46" in printed


def test_a_request_is_found_in_the_admin_calls_and_in_the_plan_log(target: str, log: Path) -> None:
    printed = run(PROGRAMS[WATCHES], target)
    assert "block_ids" in printed
    steps = re.findall(r"^step (\d+): (\d+) tokens after (\d+), ", printed, re.M)
    assert [(int(tokens), int(context)) for _, tokens, context in steps] == [(9, 0), *((1, n) for n in range(9, 208))]
    # Other programs may have run before: the page's step 1 is the first of this request.
    printed = run(PROGRAMS[READS_LOG].replace("{1}", f"{{{steps[0][0]}}}"), target, log.parent)
    assert re.findall(r"^\d+ (\w+)", printed, re.M) == ["add_request", "plan_step", "apply_result"]
