"""A peer in its own process: questions go to its stdin, answers come from its stdout, one JSON line each."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.rows import ROOT, BenchmarkError

_STOP_S = 10.0


class PeerProcess:
    """A peer that has reported its version and possibly more facts, and waits for questions."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self.about = self._answer()
        """The facts that the peer reported, at least "version"."""
        self.version = str(self.about["version"])

    @property
    def pid(self) -> int:
        """The peer's process; it may have children."""
        return self._process.pid

    def call(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Send a question and return the answer; if the peer failed, raises BenchmarkError with the end of its log."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then reading the answer fails with a better message
            print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError("the peer has ended: " + last_lines(self._log))
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def peer_process(
    python: Path, module: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[PeerProcess]:
    """Run a peer's module with this interpreter and extra `environment`; at the end close its stdin and wait.

    Raises BenchmarkError if it does not start.
    """
    with log_file() as log, log.open("w", encoding="utf-8") as log_out:
        try:
            process = subprocess.Popen(
                [python, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_out,
                text=True,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            raise BenchmarkError(f"{python}: {error}") from None
        try:
            yield PeerProcess(process, log)
        finally:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            stop(process)
            process.stdout.close()


@contextlib.contextmanager
def log_file() -> Iterator[Path]:
    """A file for a peer's stderr, which exists while the peer runs."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "log"


def last_lines(log: Path, count: int = 5) -> str:
    """The last lines of a peer's log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-count:])


def stop(process: subprocess.Popen[Any], *, terminate: bool = False) -> None:
    """Wait for a process to end, with `terminate` after SIGTERM; then kill it and its descendants if they still run."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    if terminate:
        process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(family, timeout=1.0)
    for each in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def can_import(python: Path, package: str) -> bool:
    """Whether this interpreter finds a package; the package is not imported."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
