"""The services of a run: `LocalServices` starts and restarts them, and relays stand between them and before them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from cadenza_launcher.local import LocalServices
from cadenza_launcher.services.child_process import subject
from cadenza_launcher.services.family import Programs
from cadenza_launcher.services.supervised_service import RestartPolicy
from tests.chaos.health import Truth
from tests.chaos.history import History
from tests.chaos.requests import POISON_POSITION, POISON_TOKEN
from tests.chaos.service import ADDRESSES_FILE, VARIABLE, options_file
from tests.helpers.machine.relay import Relay, relay
from tests.helpers.machine.shifted_clock import ShiftedClock

EXECUTOR, SCHEDULER = "executor", "scheduler"
LIST_FILE = "executors.list"
LIMITS = {"num-gpu-blocks": 400, "max-num-seqs": 16, "max-num-batched-tokens": 256, "num-cpu-blocks": 40}
CHANGED_LIMITS: list[dict[str, int]] = [
    {**LIMITS, "num-gpu-blocks": 90},
    {**LIMITS, "max-num-seqs": 6},
    {**LIMITS, "max-num-batched-tokens": 32},
    {**LIMITS, "block-size": 32, "num-gpu-blocks": 150},
    {**LIMITS, "num-cpu-blocks": 0, "max-num-seqs": 32},
]
_STEP_US = 8000
_DISK_BYTES = 48 << 20
_PROGRESS_AFTER_S = 1.0
DEAD = "dead"
"""The reason of an executor whose process is dead."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment in the life of a service."""

    at: float
    """Of the monotonic clock, in seconds."""
    what: str


@dataclass
class Services:
    """All services, and all that faults act on. With several executors there is one more, the spare: it joins later."""

    folder: Path
    local: LocalServices
    executor_links: list[Relay]
    """By the executor's index; the last one is the spare's, if there is one."""
    num_executors: int
    """Without the spare."""
    client_link: Relay
    clock: ShiftedClock
    truth: Truth
    history: History
    is_simulated: bool
    journal: Path
    is_own_disk: bool = False
    """Whether the journal has a small file system of its own."""
    marks: list[Mark] = field(default_factory=list)

    @property
    def target(self) -> str:
        """Of the scheduler, without a relay."""
        return self.local.target

    def process(self, service: str) -> psutil.Process | None:
        """Its process; None if it is dead."""
        try:
            process = psutil.Process(self.local.pids()[service])
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except psutil.NoSuchProcess:
            return None

    def kill(self, service: str) -> None:
        """SIGKILL."""
        process = self.process(service)
        if process is not None:
            self._begin_death(service)
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _begin_death(self, service: str) -> None:
        if service == SCHEDULER:
            self.truth.begin(SCHEDULER)
        else:
            self.truth.begin(DEAD, self.executors.index(service))

    @property
    def executors(self) -> list[str]:
        """Names of the executors, without the spare."""
        return self.local.executors[: self.num_executors]

    def set_limits(self, executor: int, limits: dict[str, int], *inject: str) -> None:
        """What the next process of an executor starts with; faults that it injects are its alone."""
        file = options_file(self.folder, self.local.addresses[self.local.executors[executor]])
        _write_json(file, _executor_arguments(limits, self.is_simulated, inject))

    def write_list(self, without: Iterable[int]) -> None:
        """Change the file with the executors that the scheduler uses."""
        links = [link for index, link in enumerate(self.executor_links[: self.num_executors]) if index not in without]
        _write_list(self.folder, links)

    def mark(self, what: str, at: float | None = None) -> None:
        """Record a moment, now if not given."""
        now = time.monotonic()
        self.marks.append(Mark(now if at is None else at, what))
        self.history.write("mark", what=what, ago_s=round(now - self.marks[-1].at, 4))

    def on_log(self, service: str, line: str) -> None:
        """A line of a log has come."""
        if service == SCHEDULER and " lost: " in line:
            self.mark("lost")
            self.history.write("log", line=line)
        elif service == SCHEDULER and "is open" in line and "session" in line:
            self.mark("open")
        elif "Error" in line or "error" in line or "WARNING" in line:
            self.history.write("log", service=service, line=line)

    def on_event(self, line: str) -> None:
        """The supervisor has noticed a death."""
        self.history.write("supervisor", line=line)
        for service in (*self.executors, SCHEDULER):
            if line.startswith(f"{subject(service)} died"):
                self._begin_death(service)
                self.mark(f"{service} died")

    def on_back(self, service: str) -> None:
        """A service that had died is ready again."""
        process = self.process(service)
        if process is not None:
            with contextlib.suppress(OSError):
                self.mark(f"{service} started", _started_at(process.pid))
        self.mark(f"{service} ready")
        if service == SCHEDULER:
            self.truth.end(SCHEDULER)
        elif service in self.executors:
            index = self.executors.index(service)
            self.truth.end(DEAD, index)
            self.set_limits(index, LIMITS)

    def fill_disk(self) -> None:
        """From now on nothing can be written to the journal."""
        self.truth.begin("journal")
        if not self.is_own_disk:
            self._limit_files(1)
            return
        with (self.journal.parent / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(b"\0" * size):
                        pass

    def empty_disk(self) -> None:
        """There is room again."""
        if self.is_own_disk:
            (self.journal.parent / "filler").unlink(missing_ok=True)
        else:
            self._limit_files(-1)
        self.truth.end("journal")

    def _limit_files(self, size: int) -> None:
        process = self.process(SCHEDULER)
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))


def _started_at(pid: int) -> float:
    """When a process was started, on the monotonic clock; OSError if it is gone."""
    after_boot_s = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return after_boot_s - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()


def _executor_arguments(limits: dict[str, int], is_simulated: bool, inject: tuple[str, ...] = ()) -> list[str]:
    if is_simulated:
        inject = (f"die@{POISON_TOKEN}:{POISON_POSITION}", *inject)
    return [f"--{name}={value}" for name, value in limits.items()] + (
        [f"--inject={','.join(inject)}"] if inject else []
    )


def _write_json(file: Path, content: Any) -> None:
    _write(file, json.dumps(content))


def _write_list(folder: Path, links: Iterable[Relay]) -> None:
    _write(folder / LIST_FILE, "".join(f"{link.address}\n" for link in links))


def _write(file: Path, text: str) -> None:
    """At once, for those that read it now."""
    new = file.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)


@asynccontextmanager
async def running_services(
    folder: Path, model: Path, history: History, *, simulated: bool, num_executors: int = 1, clock_jumps: bool = True
) -> AsyncIterator[Services]:
    """All services, ready, with a journal; stopped at the end.

    clock_jumps: their clock can be moved. Each is a new interpreter then, since a fork has loaded its libraries.
    """
    clock = ShiftedClock(folder)
    variables = {**(clock.environment if clock_jumps else {}), VARIABLE: str(folder)}
    os.environ.update(variables)
    loop = asyncio.get_running_loop()
    found: list[Services] = []

    def later(name: str) -> Any:
        """A function for the supervisor's threads, which calls this method in the event loop."""
        return lambda *arguments: loop.call_soon_threadsafe(lambda: [getattr(each, name)(*arguments) for each in found])

    with _disk(folder) as is_own_disk:
        journal = folder / "disk" / "journal"
        async with contextlib.AsyncExitStack() as stack:
            num_links = num_executors + (num_executors > 1)
            links = [
                await stack.enter_async_context(relay(partial(_executor_address, folder, index)))
                for index in range(num_links)
            ]
            client_link = await stack.enter_async_context(relay(lambda: found[0].target))
            _write_list(folder, links[:num_executors])
            _write_json(folder / "executor.json", _executor_arguments(LIMITS, simulated))
            entries = [links[0].address] if num_executors == 1 else [f"file:{folder / LIST_FILE}"]
            _write_json(folder / "scheduler.json", entries)
            local = await asyncio.to_thread(_start, model, journal, simulated, folder, num_links, later)
            try:
                services = Services(
                    folder, local, links, num_executors, client_link, clock, Truth(num_executors), history, simulated,
                    journal,
                )  # fmt: skip
                services.is_own_disk = is_own_disk
                found.append(services)
                yield services
            finally:
                await asyncio.to_thread(local.close)
    for name in variables:
        del os.environ[name]


def _executor_address(folder: Path, index: int) -> str:
    return (folder / ADDRESSES_FILE).read_text(encoding="utf-8").splitlines()[index]


def _start(model: Path, journal: Path, simulated: bool, folder: Path, num_executors: int, later: Any) -> LocalServices:
    options: dict[str, Any] = {"device": "cpu", "num_threads": 1}
    if simulated:
        costs = folder / "costs.json"
        costs.write_text(json.dumps({"step_us": _STEP_US, "token_us": 20}))
        options = {"simulate": str(costs)}
    if num_executors > 1:
        options["executors"] = num_executors
    return LocalServices(
        model,
        # The scheduler knows the executors by their relays' addresses, so the supervisor cannot ask it for their steps.
        restarts=RestartPolicy(max_deaths=None, progress_after_s=_PROGRESS_AFTER_S),
        on_log=later("on_log"),
        on_event=later("on_event"),
        on_back=later("on_back"),
        programs=Programs(
            executor=("-m", "tests.chaos.service", "executor_svc"),
            scheduler=("-m", "tests.chaos.service", "scheduler_svc"),
        ),
        journal=str(journal),
        preemption="auto",
        **options,
    )


@contextlib.contextmanager
def _disk(folder: Path) -> Any:
    """A small file system of its own, if this process may mount one; otherwise a folder."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(disk)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(disk)], check=True)
