"""Follows the list of executors: DNS names that are resolved again, services of Kubernetes that are watched, files that
are read again when they change, and options that SIGHUP reads again.

Only what changes from one list to the next is done: an address that is new is added, one that vanishes is drained and
removed. So an executor that an operator added or removed by a call stays so until the list itself changes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from cadenza_common.wire.transport import format_address
from scheduler_svc.engine.fleet.executor_member import ExecutorExistsError, LastExecutorError, UnknownExecutorError
from scheduler_svc.executors.addresses import ExecutorEntries, ServiceName, addresses_in
from scheduler_svc.executors.kubernetes import Endpoints, KubernetesApi, in_daemon_thread

_LOG = logging.getLogger(__name__)
RESOLVE_S = 5.0
"""Time between two resolutions of a name, whatever its time to live is: the standard library does not report it."""
LOOK_S = 0.25
"""Time between two looks at the files."""
_LIST = "the list"

_Stamp = tuple[int, int, int] | None
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Gives the addresses of a name; raises OSError."""
Watch = Callable[[ServiceName, str], Awaitable[Endpoints]]
"""Gives the endpoints of a service once they may differ from those of a version, at once for ""; raises OSError."""


class ListedExecutors(Protocol):
    """The set of executors that the list changes."""

    def has(self, target: str) -> bool:
        """Whether there is an executor at this address."""

    def add(self, target: str) -> None:
        """Add an executor; raises ExecutorExistsError."""

    def resume(self, target: str) -> None:
        """End an executor's drain; raises UnknownExecutorError."""

    async def retire(self, target: str) -> None:
        """Drain and remove an executor; raises UnknownExecutorError, LastExecutorError."""


class Discovery:
    """Keeps the executors as the list says."""

    def __init__(
        self,
        executors: ListedExecutors,
        entries: ExecutorEntries,
        *,
        resolve: Resolve | None = None,
        watch: Watch | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._executors = executors
        self._entries = entries
        self._resolve = resolve or resolve_name
        self._watch = watch or KubernetesApi().endpoints
        self._sleep = sleep
        self._listed: dict[str, None] = {}
        """In the order of the entries."""
        self._resolved: dict[tuple[str, int], list[str]] = {}
        """The last good answer for each name."""
        self._endpoints: dict[ServiceName, tuple[str, ...]] = {}
        self._read: dict[str, list[str]] = {}
        """What each file had when it could last be read."""
        self._stamps: dict[str, _Stamp] = {}
        """Of each file when it was last read."""
        self._problems: dict[str, str] = {}
        self._retiring: dict[str, asyncio.Task[None]] = {}
        self._following: list[asyncio.Task[None]] = []
        self._stopped = False

    def start(self) -> None:
        """Read the files and add all executors that are known without a name; names are resolved by a task."""
        self._read_files()
        self._apply()
        self._follow()

    def reload(self, entries: ExecutorEntries) -> None:
        """Follow these entries from now on, and read all files again."""
        if self._stopped:
            return
        self._entries = entries
        self._read_files()
        self._apply()
        self._follow()
        if not any(self._problems.get(source) for source in (_LIST, *entries.files)):
            _LOG.info("the list of executors was read again: %s", ", ".join(self._listed) or "none is known")

    async def stop(self) -> None:
        """Follow the list no more."""
        self._stopped = True
        tasks = [*self._retiring.values(), *self._following]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _follow(self) -> None:
        """Resolve the names and list the services at once, and then again and again."""
        for task in self._following:
            task.cancel()
        services = (self._follow_service(service) for service in self._entries.services)
        work = [self._follow_names(), self._follow_files(), *services]
        self._following = [asyncio.create_task(each, name="discovery") for each in work]

    async def _follow_names(self) -> None:
        while self._entries.names:
            for name in self._entries.names:
                await self._look_up(name)
            self._apply()
            await self._sleep(RESOLVE_S)

    async def _look_up(self, name: tuple[str, int]) -> None:
        """Take the answer for a name; an empty or failed one changes nothing."""
        key = format_address(*name)
        try:
            found = await self._resolve(*name)
        except OSError as exc:
            self._report(key, f"cannot be resolved: {exc.strerror or exc}")
            return
        if not found:
            self._report(key, "has no address")
            return
        self._report(key, "")
        self._resolved[name] = found

    async def _follow_service(self, service: ServiceName) -> None:
        version = ""
        while True:
            try:
                found = await self._watch(service, version)
            except OSError as exc:
                self._report(str(service), f"cannot be read: {exc.strerror or exc}")
                version = ""
                await self._sleep(RESOLVE_S)
                continue
            version = found.version
            if not found.addresses:
                self._report(str(service), "has no endpoint that is ready")
                continue
            self._report(str(service), "")
            self._endpoints[service] = found.addresses
            self._apply()

    async def _follow_files(self) -> None:
        """Read the files again once they have changed, and then stayed so for a look: not half of what is written."""
        before: dict[str, _Stamp] = {}
        while self._entries.files:
            await self._sleep(LOOK_S)
            stamps = await asyncio.to_thread(lambda: {path: _stamp(path) for path in self._entries.files})
            if stamps == before and any(stamp != self._stamps.get(path) for path, stamp in stamps.items()):
                self._read_files()
                self._apply()
            before = stamps

    def _read_files(self) -> None:
        for path in self._entries.files:
            self._stamps[path] = _stamp(path)
            try:
                self._read[path] = addresses_in(Path(path).read_text())
            except (OSError, ValueError) as exc:
                reason = exc.strerror if isinstance(exc, OSError) else exc
                self._report(path, f"cannot be read: {reason}")
            else:
                self._report(path, "")

    def _report(self, source: str, problem: str, level: int = logging.WARNING) -> None:
        """Log a problem once, until it has passed or is another one."""
        if problem and problem != self._problems.get(source):
            _LOG.log(level, "executors of %s: it %s; the executors stay as they are", source, problem)
        self._problems[source] = problem

    def _apply(self) -> None:
        """Do what has changed since the last list."""
        entries = self._entries
        found = list(entries.addresses)
        for name in entries.names:
            found += self._resolved.get(name, ())
        for service in entries.services:
            found += self._endpoints.get(service, ())
        for path in entries.files:
            found += self._read.get(path, ())
        if not found:
            # Names and services are resolved later, and a file that cannot be read was reported.
            if not (entries.names or entries.services or any(self._problems.get(path) for path in entries.files)):
                # A list that others write, as with Ray, may begin so.
                self._report(_LIST, "is empty", level=logging.WARNING if self._listed else logging.INFO)
            return
        self._report(_LIST, "")
        before, self._listed = self._listed, dict.fromkeys(found)
        for target in self._listed:
            if target not in before:
                self._add(target)
        for target in before:
            if target not in self._listed and target not in self._retiring and self._executors.has(target):
                text, about = "executor %s is not in the list any more: it is drained and removed", {"executor": target}
                _LOG.info(text, target, extra=about)
                self._retiring[target] = asyncio.create_task(self._retire(target), name=f"retire {target}")

    def _add(self, target: str) -> None:
        retiring = self._retiring.pop(target, None)
        if retiring is not None:
            retiring.cancel()
        try:
            if self._executors.has(target):
                self._executors.resume(target)
            else:
                self._executors.add(target)
        except (ExecutorExistsError, UnknownExecutorError, ValueError) as exc:
            text = "executor %s is in the list and cannot be added: %s"
            _LOG.warning(text, target, exc, extra={"executor": target})

    async def _retire(self, target: str) -> None:
        try:
            await self._executors.retire(target)
        except (UnknownExecutorError, LastExecutorError) as exc:
            _LOG.warning("executor %s is not removed: %s", target, exc, extra={"executor": target})
        self._retiring.pop(target, None)


def _stamp(path: str) -> _Stamp:
    """What changes with a file; None: it cannot be looked at."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


async def resolve_name(name: str, port: int) -> list[str]:
    """The addresses of a name as the system resolves it, each HOST:PORT; raises OSError.

    In a daemon thread: the system may take 30 s and more, and a process that stops must not wait for it.
    """

    def look_up() -> list[str]:
        infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        return sorted({format_address(str(info[4][0]), port) for info in infos})

    return await in_daemon_thread(look_up, "resolving")
