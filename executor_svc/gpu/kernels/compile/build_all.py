"""Compiles many kernels in several processes: Triton's compiler holds Python's lock, and its crash ends a process."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from executor_svc.gpu.kernels.compile.build import Build, CompileError, build_errors, compile_variant
from executor_svc.gpu.kernels.compile.registry import VariantEntry, entries

_MAX_ERROR = 4000
"""Maximum length of a compiler message in characters."""


@dataclass(frozen=True, slots=True)
class Task:
    """One compilation."""

    entry: VariantEntry
    arch: int

    @property
    def label(self) -> str:
        """The task's name in progress and error messages."""
        return f"{self.entry.variant.name} for sm_{self.arch}"


@dataclass(slots=True)
class BuildOutcome:
    """The results of all tasks, in order."""

    builds: list[Build] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """One line or more for each task that does not compile, or whose build misses a requirement of its variant."""

    @property
    def refusal(self) -> str:
        """All refused builds, as a text."""
        return "\n".join([f"{len(self.refused)} refused:", *(f"- {line}" for line in self.refused)])


def tasks_of(chosen: Iterable[VariantEntry], *, quick: bool = False, newest: bool = False) -> list[Task]:
    """Return the compilations of these variants; quick: of those marked quick; newest: for the last arch of each."""
    taken = [entry for entry in chosen if entry.variant.quick or not quick]
    return [Task(entry, arch) for entry in taken for arch in entry.variant.archs[-1 if newest else 0 :]]


def build_all(tasks: Sequence[Task], jobs: int) -> BuildOutcome:
    """Compile in `jobs` processes; print progress on standard error."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(tasks)):
        waiting.put(index)
    done: dict[int, Build | str] = {}
    lock = threading.Lock()

    def serve(folder: Path) -> None:
        with _Builder(folder) as builder:
            while True:
                try:
                    index = waiting.get_nowait()
                except queue.Empty:
                    return
                result = builder.build(tasks[index])
                with lock:
                    done[index] = result
                    print(f"[{len(done)}/{len(tasks)}] {tasks[index].label}: {_summary(result)}", file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="cadenza-kernels-") as folder, ThreadPoolExecutor(jobs) as threads:
        places = [Path(folder, str(number)) for number in range(min(jobs, len(tasks)))]
        for place in places:
            place.mkdir()
        try:
            list(threads.map(serve, places))
        finally:
            # After an interrupt, do not compile the rest.
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.get_nowait()
    return _outcome(tasks, [done[index] for index in range(len(tasks))])


def _outcome(tasks: Sequence[Task], results: Sequence[Build | str]) -> BuildOutcome:
    outcome = BuildOutcome()
    for task, result in zip(tasks, results, strict=True):
        if isinstance(result, str):
            outcome.refused.append(f"{task.entry.module}: {result}")
            continue
        outcome.builds.append(result)
        for error in build_errors(task.entry.variant, result):
            outcome.refused.append(f"{task.entry.module}: {task.label} {error}")
    return outcome


def _summary(result: Build | str) -> str:
    if isinstance(result, str):
        return "FAILED"
    spilled = f", {result.spills} bytes SPILLED" if result.spills else ""
    wgmma = ", wgmma" if result.wgmma else ""
    copies = ", copy engine" if result.num_bulk_copies else ""
    facts = f"{result.num_registers} registers, {result.shared} bytes shared{spilled}{wgmma}{copies}"
    return f"{facts}, {result.seconds:.1f} s"


class _Builder:
    """A process that compiles one variant after the other, restarted after a crash."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._printed = folder / "stderr"

    def __enter__(self) -> _Builder:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join()

    def build(self, task: Task) -> Build | str:
        """Return the build, or an error message."""
        try:
            self._connection.send((task.entry.module, task.entry.variant.name, task.arch))
            result = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            result = f"{task.label}: the compiler crashed: {_ending(self._process.exitcode)}"
            crashed = True
        else:
            crashed = False
        if isinstance(result, str) and (printed := self._printed.read_text(errors="replace").strip()):
            result += f"\n{_shortened(printed)}"
        if crashed:
            self._connection.close()
            self._start()
        assert isinstance(result, Build | str)
        return result

    def _start(self) -> None:
        spawning = get_context("spawn")
        self._connection, child_end = spawning.Pipe()
        self._process = spawning.Process(target=_serve, args=(child_end, self._folder, self._printed), daemon=True)
        self._process.start()
        child_end.close()


def _serve(connection: Connection, folder: Path, printed: Path) -> None:
    """Run in the process: compile requested variants until the connection closes."""
    # LLVM prints to the file descriptor, not to Python's sys.stderr.
    descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(descriptor, 2)
    tempfile.tempdir = str(folder)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    entries_of: dict[str, dict[str, VariantEntry]] = {}
    while True:
        try:
            module, name, arch = connection.recv()
        except EOFError:
            return
        os.ftruncate(2, 0)
        try:
            if module not in entries_of:
                entries_of[module] = entries([module])
            connection.send(compile_variant(entries_of[module][name].variant, arch))
        except CompileError as error:
            connection.send(_shortened(str(error)))
        except Exception as error:
            connection.send(_shortened(f"{name} for sm_{arch}: {type(error).__name__}: {error}"))


def _shortened(text: str) -> str:
    """Return a text, or the beginning and the end of a long text."""
    if len(text) <= _MAX_ERROR:
        return text
    return f"{text[: _MAX_ERROR // 2]}\n[…]\n{text[-_MAX_ERROR // 2 :]}"


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit status {code}"
