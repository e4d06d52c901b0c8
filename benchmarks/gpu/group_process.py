"""The parent's side of `child`: starts a group's process, reads what it says, survives its end."""

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
"""More than twice its estimate, before a case is given up."""
_GRACE_S = 15.0
"""After the end of a group's time, for the case that is running then."""


class GroupProcess:
    """A process that loads, if its group has something to load, and waits to be told to go on."""

    def __init__(self, group: Group, tiny: bool, start: int = 0, every: int = 1) -> None:
        arguments = [group.name, "--start", str(start), "--every", str(every), *(["--tiny"] if tiny else [])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.child", *arguments],
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

    def say(self, timeout_s: float) -> dict[str, Any] | None:
        """What it says next; None once it has ended. Raises TimeoutError."""
        try:
            line = self._lines.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            raise TimeoutError from None
        found: dict[str, Any] | None = json.loads(line) if line else None
        return found

    def go(self, ceilings: Ceilings, end_at: float) -> None:
        """Let it begin; end_at by time.monotonic(), which all processes of a machine share."""
        assert self._process.stdin is not None
        asked = json.dumps({"ceilings": asdict(ceilings), "end_at": end_at})
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is seen when it says nothing
            print(asked, file=self._process.stdin, flush=True)

    def stop(self) -> int:
        """End it if it has not; returns its exit code."""
        if self._process.poll() is None:
            self._process.kill()
        return self._process.wait()

    def wait(self) -> int:
        """Wait a moment for its end; returns its exit code."""
        try:
            return self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            return self.stop()


def outcomes(
    group: Group, tiny: bool, ceilings: Ceilings, end_at: float, process: GroupProcess | None = None
) -> Iterator[tuple[Case, Outcome]]:
    """Each case of a group and what came of it, from one process or, after one that ended too early, several."""
    cases = group.cases(tiny)
    index = 0
    while index < len(cases) and time.monotonic() < end_at:
        process = process or GroupProcess(group, tiny, index)
        begun_at = index
        try:
            for at, told in _told(process, cases, index, ceilings, end_at):
                case = cases[at]
                outcome = Outcome(group.name, case.name, case.params, **told)
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


def _told(
    process: GroupProcess, cases: Sequence[Case], index: int, ceilings: Ceilings, end_at: float
) -> Iterator[tuple[int, dict[str, Any]]]:
    """What one process says of the cases from `index` on, until it has ended: (index, fields of the outcome)."""
    try:
        if process.say(end_at - time.monotonic()) is None:
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
            said = process.say(limit_s)
        except TimeoutError:
            yield index if running is None else running, {"error": f"nothing was heard for {limit_s:.0f} s"}
            return
        if said is None:
            if running is not None:
                yield running, {"error": f"the process ended, with {process.wait()}"}
            return
        running = said.get("begun")
        if "done" in said:
            yield said["done"], {name: value for name, value in said.items() if name != "done"}
