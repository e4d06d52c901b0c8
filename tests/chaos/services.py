"""The services of a run: `LocalServices` starts and restarts them, and relays stand between them and before them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from cadenza.local import LocalServices, Programs
from cadenza.supervisor import RestartPolicy
from tests.chaos.health import Truth
from tests.chaos.history import History
from tests.chaos.requests import POISON_POSITION, POISON_TOKEN
from tests.chaos.service import ADDRESS_FILE, VARIABLE
from tests.helpers.relay import Relay, relay
from tests.helpers.shifted_clock import ShiftedClock

EXECUTOR, SCHEDULER = "executor", "scheduler"
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


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment in the life of a service."""

    at: float
    """Of the monotonic clock, in seconds."""
    what: str


@dataclass
class Services:
    """Both services, and all that faults act on."""

    folder: Path
    local: LocalServices
    executor_link: Relay
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
            self.truth.begin(service)
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def set_limits(self, limits: dict[str, int], *inject: str) -> None:
        """What the next process of the executor starts with; faults that it injects are its alone."""
        _write_options(self.folder, self.executor_link.address, limits, self.is_simulated, inject)

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
        for service in (EXECUTOR, SCHEDULER):
            if f"the {service} died" in line:
                self.truth.begin(service)
                self.mark(f"{service} died")

    def on_back(self, service: str) -> None:
        """A service that had died is ready again."""
        process = self.process(service)
        if process is not None:
            with contextlib.suppress(OSError):
                self.mark(f"{service} started", _started_at(process.pid))
        self.mark(f"{service} ready")
        self.truth.end(service)
        if service == EXECUTOR:
            self.set_limits(LIMITS)

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


def _write_options(
    folder: Path, executor: str, limits: dict[str, int], is_simulated: bool, inject: tuple[str, ...] = ()
) -> None:
    if is_simulated:
        inject = (f"die@{POISON_TOKEN}:{POISON_POSITION}", *inject)
    arguments = [f"--{name}={value}" for name, value in limits.items()]
    arguments += [f"--inject={','.join(inject)}"] if inject else []
    content = json.dumps({"arguments": arguments, "executor": executor})
    new = folder / "options.new"
    new.write_text(content, encoding="utf-8")
    new.replace(folder / "options.json")


@asynccontextmanager
async def running_services(folder: Path, model: Path, history: History, *, simulated: bool) -> AsyncIterator[Services]:
    """Both services, ready, with a journal; stopped at the end."""
    clock = ShiftedClock(folder)
    os.environ.update(clock.environment, **{VARIABLE: str(folder / "options.json")})
    loop = asyncio.get_running_loop()
    found: list[Services] = []

    def later(name: str) -> Any:
        """A function for the supervisor's threads, which calls this method in the event loop."""
        return lambda *arguments: loop.call_soon_threadsafe(lambda: [getattr(each, name)(*arguments) for each in found])

    with _disk(folder) as is_own_disk:
        journal = folder / "disk" / "journal"
        async with (
            relay(lambda: (folder / ADDRESS_FILE).read_text(encoding="utf-8")) as executor_link,
            relay(lambda: found[0].target) as client_link,
        ):
            _write_options(folder, executor_link.address, LIMITS, simulated)
            local = await asyncio.to_thread(_start, model, journal, simulated, folder, later)
            try:
                services = Services(
                    folder, local, executor_link, client_link, clock, Truth(), history, simulated, journal
                )
                services.is_own_disk = is_own_disk
                found.append(services)
                yield services
            finally:
                await asyncio.to_thread(local.close)
    for name in (*clock.environment, VARIABLE):
        del os.environ[name]


def _start(model: Path, journal: Path, simulated: bool, folder: Path, later: Any) -> LocalServices:
    options: dict[str, Any] = {"device": "cpu", "num_threads": 1}
    if simulated:
        costs = folder / "costs.json"
        costs.write_text(json.dumps({"step_us": _STEP_US, "token_us": 20}))
        options = {"simulate": str(costs)}
    return LocalServices(
        model,
        restarts=RestartPolicy(max_deaths=None),
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
