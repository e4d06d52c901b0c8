"""Looks after a container as the kubelet of its node does: asks its probes at their times, and ends it in order."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from tests.helpers.docker_engine import inspect, run
from tests.helpers.manifests import Manifest, PodTemplate
from tests.helpers.probes import failure_in_container

_DEFAULTS = {"periodSeconds": 10, "timeoutSeconds": 1, "failureThreshold": 3}
"""Kubernetes' own, where a probe does not say."""
_READY_S = 240


class Kubelet:
    """One container that runs, until it is told to end it.

    A container whose startup or liveness probe fails too often is started again. `changed` is called whenever
    readiness may be another.
    """

    def __init__(self, template: PodTemplate, container: str, changed: Callable[[], None]) -> None:
        self.template = template
        self.container = container
        self.answers: Counter[tuple[str, bool]] = Counter()
        """How often each probe passed and failed."""
        self.failures: list[str] = []
        """Each probe that failed, and why."""
        self.restarts: list[str] = []
        """The probe for which the container was started again, of each time."""
        self._ready = asyncio.Event()
        self._changed = changed
        self._spec = template.container
        self._restarted = asyncio.Event()
        self._restarting: asyncio.Task[None] | None = None
        self.address = self._find_address()
        self._probing = asyncio.create_task(self._run())

    @property
    def ready(self) -> bool:
        """Whether its services have it."""
        return self._ready.is_set()

    async def until_ready(self) -> None:
        """Wait until it is; raises what the container has printed if it takes too long."""
        try:
            async with asyncio.timeout(_READY_S):
                await self._ready.wait()
        except TimeoutError:
            raise AssertionError(f"not ready after {_READY_S} s: {await self.log()}") from None

    async def until_restarted(self) -> None:
        """Wait until a probe has had the container started again, and it is ready."""
        await self._restarted.wait()
        await self.until_ready()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the container was started with."""
        return dict(each.split("=", 1) for each in inspect(self.container)["Config"]["Env"])

    async def end(self) -> str:
        """Delete the pod: it gets the preStop hook, then SIGTERM, and must end by itself, with code 0, in its grace
        period, which begins before the hook. Returns its log.
        """
        await self.forget()
        grace_s, began = self.template.spec["terminationGracePeriodSeconds"], time.monotonic()
        match self._spec.get("lifecycle"):
            case {"preStop": {"sleep": {"seconds": int(hook_s)}}}:
                await asyncio.sleep(hook_s)
            case hook:
                assert hook is None, f"a hook that this rig does not know: {hook}"
        left_s = grace_s - (time.monotonic() - began)
        await asyncio.to_thread(run, "docker", "stop", f"-t{left_s:.0f}", self.container)
        log, code = await self.log(), inspect(self.container)["State"]["ExitCode"]
        assert time.monotonic() - began < grace_s, log
        assert code == 0, f"{code}: {log}"
        await self.remove()
        return log

    async def kill(self) -> None:
        """The kernel ends the container's process, such as for lack of memory."""
        await asyncio.to_thread(run, "docker", "kill", self.container)

    async def freeze(self) -> None:
        """Stop the container's process, which answers nothing from now on, nor takes a SIGTERM."""
        await asyncio.to_thread(run, "docker", "kill", "--signal=STOP", self.container)

    async def ended(self) -> int:
        """Wait until the container has ended by itself; returns its exit code."""
        code = int(await asyncio.to_thread(run, "docker", "wait", self.container))
        await self.forget()
        return code

    async def forget(self) -> None:
        """Ask no probe any more: the pod is not ready from now on. Raises what has ended the probing before."""
        self._probing.cancel()
        await asyncio.wait([self._probing])
        if not self._probing.cancelled():
            self._probing.result()
        if self._restarting is not None:
            await self._restarting
        self._set_ready(False)

    async def log(self) -> str:
        """What the container has printed."""
        return await asyncio.to_thread(run, "sh", "-c", 'docker logs "$0" 2>&1', self.container)

    async def remove(self) -> None:
        """Remove a container that has ended."""
        await asyncio.to_thread(run, "docker", "rm", "--force", self.container)

    def _find_address(self) -> str:
        (network,) = inspect(self.container)["NetworkSettings"]["Networks"].values()
        return str(network["IPAddress"])

    async def _run(self) -> None:
        while True:
            failed = await self._life()
            self.restarts.append(failed)
            self._set_ready(False)
            self._restarting = asyncio.create_task(asyncio.to_thread(self._restart))
            await asyncio.shield(self._restarting)
            self._restarted.set()

    def _restart(self) -> None:
        run("docker", "restart", f"-t{self.template.spec['terminationGracePeriodSeconds']}", self.container)
        self.address = self._find_address()

    async def _life(self) -> str:
        """Ask the probes of one life of the container; returns the one for which it must end."""
        if "startupProbe" in self._spec and not await self._starts():
            return "startupProbe"
        readiness = asyncio.create_task(self._readiness())
        try:
            await self._dies()
        finally:
            readiness.cancel()
        return "livenessProbe"

    async def _starts(self) -> bool:
        probe = self._probe("startupProbe")
        for _ in range(probe["failureThreshold"]):
            if await self._passes("startupProbe"):
                return True
            await asyncio.sleep(probe["periodSeconds"])
        return False

    async def _readiness(self) -> None:
        """A pod without this probe is ready as soon as it has started."""
        if "readinessProbe" not in self._spec:
            self._set_ready(True)
            return
        probe, failures = self._probe("readinessProbe"), 0
        while True:
            passed = await self._passes("readinessProbe")
            failures = 0 if passed else failures + 1
            if passed or failures >= probe["failureThreshold"]:
                self._set_ready(passed)
            await asyncio.sleep(probe["periodSeconds"])

    async def _dies(self) -> None:
        """Return when the liveness probe has failed as often in a row as it may."""
        if "livenessProbe" not in self._spec:
            await asyncio.Event().wait()
        probe, failures = self._probe("livenessProbe"), 0
        while failures < probe["failureThreshold"]:
            failures = 0 if await self._passes("livenessProbe") else failures + 1
            await asyncio.sleep(probe["periodSeconds"])

    async def _passes(self, name: str) -> bool:
        timeout_s = self._probe(name)["timeoutSeconds"]
        asked = failure_in_container, self.template, name, self.container, self.address, timeout_s
        failure = await asyncio.to_thread(*asked)
        self.answers[name, failure is None] += 1
        if failure is not None:
            self.failures.append(f"{name}: {failure}")
        return failure is None

    def _probe(self, name: str) -> Manifest:
        return _DEFAULTS | self._spec[name]

    def _set_ready(self, ready: bool) -> None:
        if ready != self.ready:
            (self._ready.set if ready else self._ready.clear)()
            self._changed()
