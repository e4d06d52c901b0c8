"""The executor as a process: bind, load on the device thread, serve, finish the running step, stop."""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from cadenza_common.metrics.listener_counts import EXECUTOR_REFUSALS, ListenerCounts
from cadenza_common.serving.connection_limits import allow_connections, start_peer_limit
from cadenza_common.serving.stop_signals import StopSignals
from cadenza_common.telemetry.otlp import Traces, TracesError
from cadenza_common.wire.tls.files import TlsError
from cadenza_common.wire.tls_server import ListenerFiles, credentials_of, listener_files
from cadenza_common.wire.transport import EXECUTOR_PORT, bind
from executor_svc.config import ExecutorConfig
from executor_svc.errors import StartError
from executor_svc.models.folder import with_local_files
from executor_svc.plan.description import Description
from executor_svc.ranks.hosts.places import RankPlace
from executor_svc.service.servicer import add_services
from executor_svc.service.unreadable import limited_server
from executor_svc.speculation.drafts import DraftSource
from executor_svc.worker.watchdog import StepWatchdog
from executor_svc.worker.worker import Executor, Worker

if TYPE_CHECKING:
    from executor_svc.service.metrics import ExecutorMetrics

_log = logging.getLogger(__name__)

# Seconds that a stop waits for streams, and then for the running step.
_STOP_GRACE_S = 0.2
_STOP_STEP_S = 1.5
EXIT_OPTIONS, EXIT_HUNG = 2, 4


def build_executor(
    config: ExecutorConfig,
    described: Future[Description],
    drafts: DraftSource | None = None,
    place: RankPlace | None = None,
) -> Executor:
    """Load the model and build its executor, or the simulated one. Runs on the device thread.

    Sets the result of `described` to the description. drafts: in place of the source of the options. place: of rank 0
    among ranks that something else has started. Raises StartError with a message for the user.
    """
    executor, description = _build(config, drafts, place)
    described.set_result(description)
    return executor


def _build_without_collections(
    config: ExecutorConfig, described: Future[Description], drafts: DraftSource | None, place: RankPlace | None
) -> Executor:
    """Build as `build_executor` does, and exempt the modules from garbage collection; for the service's own process.

    torch creates 190,000 objects, none of them garbage. Without collections its import takes 0.1 s less, and so does
    the collection at the end of the start (measured).
    """
    gc.disable()
    try:
        if config.simulate is None:
            import executor_svc.startup.build  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
    return build_executor(config, described, drafts, place)


def _build(config: ExecutorConfig, drafts: DraftSource | None, place: RankPlace | None) -> tuple[Executor, Description]:
    # Imported here: the simulated executor needs no torch.
    if config.simulate is not None:
        from executor_svc.simulated.build import build_simulated

        return build_simulated(config, drafts)
    from executor_svc.startup.build import build_model

    return build_model(with_local_files(config), drafts, place)


async def serve(
    config: ExecutorConfig,
    report: Callable[[str], None],
    drafts: DraftSource | None = None,
    place: RankPlace | None = None,
) -> tuple[int, bool]:
    """Serve until a signal arrives; `report` prints an error for the user, in one line.

    drafts: in place of the source of the options. place: of rank 0 among ranks that something else has started.

    Returns the exit code and whether the device thread has ended; if it has not, only os._exit ends the process in
    time.
    """
    signals = StopSignals()
    signals.install()
    scheduler_name = None if config.tls_client_ca is None else config.tls_scheduler_name
    counts = ListenerCounts(EXECUTOR_REFUSALS)
    server = limited_server(scheduler_name, config.max_connections, counts)
    try:
        files = listener_files(config, default_port=EXECUTOR_PORT)
        allow_connections(config.max_connections)
        # Before the model is loaded, so that a port in use is reported at once; connections wait until the server
        # starts.
        address = bind(server, config.listen, default_port=EXECUTOR_PORT, credentials=credentials_of(files))
        traces = open_traces(config, address)
        metrics = _metrics(config, counts, files)
    except (OSError, TracesError) as exc:
        report(str(exc))
        return 1, True
    except TlsError as exc:
        report(str(exc))
        return EXIT_OPTIONS, True
    peer_limit = start_peer_limit(address, config.max_connections_per_peer, counts)
    described: Future[Description] = Future()
    worker = Worker(lambda: _build_without_collections(config, described, drafts, place))
    worker.start()
    try:
        if await _wait_until_loaded(signals.stop, worker, report):
            with _watchdog(worker, config.step_timeout_s):
                services = await add_services(server, worker, described.result(), spans=traces)
                if metrics is not None:
                    metrics.start(worker, described.result(), services.execution.leases)
                code = await _serve_until(signals.stop, server, worker, address, report)
                if code == 0:
                    await services.finish(config.drain_timeout_s, signals.at_once)
        else:
            code = 0 if signals.stop.is_set() else 1
    finally:
        if peer_limit is not None:
            peer_limit.cancel()
        if metrics is not None:
            metrics.stop()
        ended = await _stop(server, worker)
        if traces is not None:
            await asyncio.to_thread(traces.close)
    return code, ended


def open_traces(config: ExecutorConfig, address: str) -> Traces | None:
    """What sends the spans of steps; None: nothing does. Raises TracesError."""
    if config.otlp_traces_endpoint is None:
        return None
    version = importlib.metadata.version("cadenza")
    return Traces(config.otlp_traces_endpoint, "cadenza-executor", version=version, instance=address)


def _metrics(config: ExecutorConfig, counts: ListenerCounts, files: ListenerFiles | None) -> ExecutorMetrics | None:
    """Bind the port of the metrics, if there is one; raises OSError."""
    if config.metrics_port is None:
        return None
    # Imported here: it takes some 0.1 s, which only metrics need.
    from executor_svc.service import metrics

    return metrics.ExecutorMetrics(config.metrics_host, config.metrics_port, config.metrics_token_file, counts, files)


async def _stop(server: grpc.aio.Server, worker: Worker) -> bool:
    await server.stop(_STOP_GRACE_S)
    return await asyncio.to_thread(worker.stop, _STOP_STEP_S)


async def _wait_until_loaded(stop: asyncio.Event, worker: Worker, report: Callable[[str], None]) -> bool:
    """Wait for the model; return False if it cannot be loaded or `stop` is set first."""
    ready = asyncio.wrap_future(worker.ready)
    await _wait_for_first(stop, ready)
    if stop.is_set():
        return False
    try:
        ready.result()
    except StartError as exc:
        report(str(exc))
        return False
    return True


async def _serve_until(
    stop: asyncio.Event,
    server: grpc.aio.Server,
    worker: Worker,
    address: str,
    report: Callable[[str], None],
) -> int:
    """Serve until `stop` is set or the device is lost; return the exit code."""
    await server.start()
    # Everything loaded lives as long as the process: the collector need not visit it during steps.
    gc.collect()
    gc.freeze()
    print(f"ready {address}", flush=True)
    lost = asyncio.wrap_future(worker.lost)
    await _wait_for_first(stop, lost)
    if stop.is_set():
        _log.info("stopping")
        return 0
    report(f"the device is lost: {lost.result()}")
    return 1


@contextmanager
def _watchdog(worker: Worker, timeout_s: float) -> Iterator[None]:
    """End this process when a step runs for longer than timeout_s seconds; 0: never."""
    if not timeout_s:
        yield
        return
    # The device thread does not end, so only os._exit ends the process.
    watchdog = StepWatchdog(worker.activity, timeout_s, lambda: os._exit(EXIT_HUNG))
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


async def _wait_for_first(stop: asyncio.Event, other: asyncio.Future[Any]) -> None:
    """Return once the event is set or the future is done."""
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((stopped, other), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
