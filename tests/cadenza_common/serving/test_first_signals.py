"""A service that gets SIGTERM while it still imports ends, also as the first process of a container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

ENDLESS = """
import sys
print("importing", flush=True)
sys.stdin.read()
"""


def ignore_signals() -> None:
    """A process with inherited ignoring is as one with number 1: it gets what it handles, and nothing else."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.interpreter
@pytest.mark.parametrize("module", ["scheduler_svc", "executor_svc", "gateway_svc"])
def test_a_service_that_imports_ends_on_sigterm(module: str, tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text(ENDLESS)
    paths = [str(tmp_path), str(ROOT), str(ROOT / "client")]
    with subprocess.Popen(
        [sys.executable, "-m", module],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=ignore_signals,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.terminate()
        try:
            assert process.wait(timeout=10) == 0
        finally:
            process.kill()
