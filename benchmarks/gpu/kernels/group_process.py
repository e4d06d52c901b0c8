"""The parent's side of `child`: starts a group's process, reads its outcomes, continues after a crash."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.common.rows import ROOT
from benchmarks.gpu.cases import Case, Ceilings, Group, Outcome

_SLOW_S = 60.0
"""A case is given up when it takes this much more than twice its estimate."""
_GRACE_S = 15.0
"""Extra time after a group's end for the case that still runs."""


class GroupProcess:
    """A child process. It preloads, then waits for `go`."""

    def __init__(self, group: Group, tiny: bool, start: int = 0, every: int = 1) -> None:
        arguments = [group.name, "--start", str(start), "--every", str(every), *(["--tiny"] if tiny else [])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.kernels.child", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message; None once the process has ended. Raises TimeoutError."""
        try:
            line = self._lines.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            raise TimeoutError from None
        message: dict[str, Any] | None = json.loads(line) if line else None
        return message

    def go(self, ceilings: Ceilings, end_at: float) -> None:
        """Start the cases; end_at is of time.monotonic(), which all processes of a machine share."""
        assert self._process.stdin is not None
        message = json.dumps({"ceilings": asdict(ceilings), "end_at": end_at})
        # A process that has ended shows when nothing more is received.
        with contextlib.suppress(BrokenPipeError):
            print(message, file=self._process.stdin, flush=True)

    def stop(self) -> int:
        """Kill the process if it still runs; returns its exit code."""
        if self._process.poll() is None:
            self._process.kill()
        return self._process.wait()

    def wait(self) -> int:
        """Wait up to 10 s for its end, then kill it; returns its exit code."""
        try:
            return self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            return self.stop()


def outcomes(
    group: Group, tiny: bool, ceilings: Ceilings, end_at: float, process: GroupProcess | None = None
) -> Iterator[tuple[Case, Outcome]]:
    """Every case of a group with its outcome. A process that ends too early is replaced by another."""
    cases = group.cases(tiny)
    index = 0
    while index < len(cases) and time.monotonic() < end_at:
        process = process or GroupProcess(group, tiny, index)
        begun_at = index
        try:
            for at, fields in _received(process, cases, index, ceilings, end_at):
                case = cases[at]
                outcome = Outcome(group.name, case.name, case.params, **fields)
                yield case, outcome
                if outcome.ends_group:
                    return
                index = at + 1
        finally:
            process.stop()
        process = None
        if index == begun_at:
            break
    for case in cases[index:]:
        yield case, Outcome(group.name, case.name, case.params, skipped="no time was left")


def _received(
    process: GroupProcess, cases: Sequence[Case], index: int, ceilings: Ceilings, end_at: float
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(index, fields of its outcome) of the cases from `index` on, until the process ends."""
    try:
        if process.receive(end_at - time.monotonic()) is None:
            yield index, {"error": f"the process ended while it loaded, with {process.wait()}"}
            return
    except TimeoutError:
        return
    process.go(ceilings, end_at)
    running: int | None = None
    while True:
        limit_s = _SLOW_S + (0.0 if running is None else 2 * cases[running].estimate_s)
        limit_s = max(0.0, min(limit_s, end_at + _GRACE_S - time.monotonic()))
        try:
            message = process.receive(limit_s)
        except TimeoutError:
            yield index if running is None else running, {"error": f"no message for {limit_s:.0f} s"}
            return
        if message is None:
            if running is not None:
                yield running, {"error": f"the process ended, with {process.wait()}"}
            return
        running = message.get("begun")
        if "done" in message:
            yield message["done"], {name: value for name, value in message.items() if name != "done"}
