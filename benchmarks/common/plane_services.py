"""Services as processes, with the CPU time that they have taken, plain or with what an operator turns on.

The executor is simulated. Certificates for mutual TLS are made on the spot. With metrics, both services are scraped
each second, as Prometheus would.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from unittest import mock

import psutil

from benchmarks.common.checkpoints import DEMO_MODEL
from benchmarks.common.plane_clients import PROMPT_TOKENS, VOCAB_SIZE, Load, over_sessions, over_streams
from benchmarks.common.rows import BenchmarkError
from cadenza.credentials import TOKEN_VARIABLE
from cadenza_cli.admin.tenants_editor import TenantsEditor
from cadenza_launcher.certs import make_certs
from cadenza_launcher.services.ports import reserve_port


@contextlib.asynccontextmanager
async def service_process(module: str, *options: str, listen: str = "--listen") -> AsyncIterator[tuple[int, str]]:
    """Run `python -m module` on a free port, which it takes by the option `listen`.

    Yields its process id and address once it serves.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, listen, "127.0.0.1:0", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        if not line.startswith("ready "):
            raise BenchmarkError(f"{module} did not start: {line!r}")
        yield process.pid, line.split()[1]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process since it began."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class BenchmarkCertificates:
    """Options of services, and the environment of their clients."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        make_certs(folder)

    def listener(self, party: str) -> tuple[str, ...]:
        """The options of a service's listener."""
        own = self._folder / party
        return (
            *("--tls-cert", str(own / f"{party}.pem"), "--tls-key", str(own / f"{party}-key.pem")),
            *("--tls-client-ca", str(own / "ca.pem")),
        )

    def executor_link(self) -> tuple[str, ...]:
        """The scheduler's options for its connection to the executor."""
        own = self._folder / "scheduler"
        return (
            *("--executor-ca", str(own / "ca.pem"), "--executor-cert", str(own / "scheduler.pem")),
            *("--executor-key", str(own / "scheduler-key.pem")),
        )

    def client_environment(self) -> dict[str, str]:
        """The variables by which a client connects with a certificate of its own."""
        own = self._folder / "client"
        files = {"CA": own / "ca.pem", "CERT": own / "client.pem", "KEY": own / "client-key.pem"}
        return {f"CADENZA_TLS_{name}": str(path) for name, path in files.items()}


_MAX_RUNNING = 2048
_MAX_TOKENS = 2048
_SCRAPE_INTERVAL_S = 1.0
_SCRAPE_TIMEOUT_S = 10.0
_SCRAPE_HEADERS = {"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "gzip"}
"""Those of Prometheus."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What is on beside the plain services."""

    tls: bool = False
    metrics: bool = False
    tokens: bool = False

    def on(self) -> dict[str, object]:
        """Row parameters: those that are on."""
        return {each.name: True for each in fields(self) if getattr(self, each.name)}

    def title(self) -> str:
        """Names what is on."""
        return "+".join(self.on()) or "plain"

    def in_turn(self) -> list[Extras]:
        """Nothing, each that is on alone, and all of them: the variants that a comparison measures."""
        alone = [Extras(**{name: True}) for name in self.on()]
        return [Extras(), *alone, *([self] if len(alone) > 1 else [])]


@dataclass(frozen=True, slots=True)
class Services:
    """Running services, the environment of their clients, and the addresses of their metrics."""

    target: str
    scheduler: int
    executor: int
    extras: Extras = field(default_factory=Extras)
    client_environment: Mapping[str, str] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """In the body, clients of this process connect as these services require, and their metrics are scraped.

        No service may be started there.
        """
        with mock.patch.dict(os.environ, self.client_environment), scraped(self.metrics):
            yield


@contextlib.asynccontextmanager
async def plane_services(step_us: float, extras: Extras) -> AsyncIterator[Services]:
    """Start the services with steps of `step_us`; yields them after a warm-up."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as kept:
        folder, environment = Path(name), dict[str, str]()
        executor, scheduler = _plain_options(folder, step_us)
        addresses = [reserve_port("127.0.0.1", kept) for _ in range(2)] if extras.metrics else []
        for options, address in zip((executor, scheduler), addresses, strict=False):
            options += ["--metrics-port", address.rpartition(":")[2]]
        if extras.tls:
            certificates = BenchmarkCertificates(folder / "certs")
            executor += certificates.listener("executor")
            scheduler += (*certificates.listener("scheduler"), *certificates.executor_link())
            environment |= certificates.client_environment()
        if extras.tokens:
            tenants = str(folder / "tenants.toml")
            environment[TOKEN_VARIABLE] = TenantsEditor.open(tenants, create=True).add_tenant("benchmark", {})
            scheduler += ["--tenants", tenants]
        async with (
            service_process("executor_svc", *executor) as (executor_pid, at),
            service_process("scheduler_svc", "--executor", at, *scheduler) as (scheduler_pid, target),
        ):
            services = Services(target, scheduler_pid, executor_pid, extras, environment, tuple(addresses))
            with services.in_use():
                warm_up = Load(64, 32, text=True)
                await over_sessions(target, warm_up, 1)
                await over_streams(target, warm_up)
            yield services


def _plain_options(folder: Path, step_us: float) -> tuple[list[str], list[str]]:
    costs = folder / "costs.json"
    costs.write_text(json.dumps({"step_us": step_us}))
    executor = [
        *("--simulate", str(costs) if step_us else "instant", "--simulate-vocab-size", str(VOCAB_SIZE)),
        *("--max-num-seqs", str(_MAX_RUNNING), "--max-num-batched-tokens", "8192"),
        *("--max-model-len", str(_MAX_TOKENS + PROMPT_TOKENS)),
    ]
    return executor, ["--tokenizer", str(DEMO_MODEL), "--max-queued-requests", str(2 * _MAX_RUNNING)]


@contextlib.contextmanager
def scraped(addresses: Collection[str]) -> Iterator[None]:
    """Scrape the addresses each second meanwhile, first after half a second, and once more after the body.

    Raises BenchmarkError at the end if a scrape has failed.
    """
    stopping, failures = threading.Event(), list[str]()

    def scrape_all() -> None:
        is_last = stopping.wait(_SCRAPE_INTERVAL_S / 2)
        while not failures:
            failures.extend(failure for address in addresses if (failure := _scrape(address)))
            if is_last:
                return
            is_last = stopping.wait(_SCRAPE_INTERVAL_S)

    thread = threading.Thread(target=scrape_all, name="scraper")
    if addresses:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        if addresses:
            thread.join()
    if failures:
        raise BenchmarkError(f"scraping failed: {failures[0]}")


def _scrape(address: str) -> str:
    """Read the metrics of a service; returns what went wrong."""
    connection = http.client.HTTPConnection(address, timeout=_SCRAPE_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics", headers=_SCRAPE_HEADERS)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        return f"{address}: {error!r}"
    finally:
        connection.close()
    return "" if response.status == 200 and body else f"{address}: status {response.status}, {len(body)} bytes"
