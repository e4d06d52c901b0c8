"""The Python programs of README and quickstart, run as they stand there against both services on the demo model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cadenza_launcher.local import LocalServices
from tests.helpers.paths import ROOT

ADDRESS = "127.0.0.1:50051"
PROGRAMS = {
    f"{page}-{number}": program
    for page in ("README.md", "docs/quickstart.md")
    for number, program in enumerate(re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.S | re.M))
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with LocalServices(ROOT / "models" / "cadenza-demo", num_gpu_blocks=256) as services:
        yield services.target


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_runs(name: str, target: str) -> None:
    program = PROGRAMS[name].replace(ADDRESS, target)
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if "12+34=" in program:
        assert "46" in done.stdout
