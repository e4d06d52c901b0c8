"""A peer in a process of its own: cases go to its stdin, metrics come from its stdout, one JSON line each."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.rows import ROOT, BenchmarkError
from benchmarks.common.scheduler_load import Case


class PeerProcess:
    """A peer that has said its version and waits for cases."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self.version = str(self._answer()["version"])

    def measure(self, case: Case, num_steps: int, seed: int) -> dict[str, float]:
        """Metrics as `StepTimes.metrics`; raises BenchmarkError with the end of what the peer wrote if it failed."""
        assert self._process.stdin is not None
        asked = {"case": asdict(case), "steps": num_steps, "seed": seed}
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either, which is said better
            print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise BenchmarkError("the peer has ended: " + "\n".join(said[-5:]))
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def peer_process(python: Path, module: str) -> Iterator[PeerProcess]:
    """Run a peer's module with this interpreter; raises BenchmarkError if it does not start."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w", encoding="utf-8") as log:
        try:
            process = subprocess.Popen(
                [python, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
            )
        except OSError as error:
            raise BenchmarkError(f"{python}: {error}") from None
        try:
            yield PeerProcess(process, Path(log.name))
        finally:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.terminate()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def can_import(python: Path, package: str) -> bool:
    """Does this interpreter find a package? It is not imported."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
