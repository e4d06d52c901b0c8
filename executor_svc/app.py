"""The executor as a process: bind, load on the device thread, serve, stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import grpc

from cadenza.transport import EXECUTOR_PORT, bind, server_options
from executor_svc.config import ExecutorConfig
from executor_svc.errors import StartError
from executor_svc.plan.description import Description
from executor_svc.service.servicer import add_services
from executor_svc.worker.worker import Executor, Worker

_log = logging.getLogger(__name__)

# How long a stop waits for streams and then for the running step.
_STOP_GRACE_S = 0.2
_STOP_STEP_S = 1.5


def build_executor(config: ExecutorConfig, described: Future[Description]) -> Executor:
    """Load the model and make everything that computes, or the simulated executor; to run on the device thread.

    Puts the description into `described`; raises StartError, whose message is for the user.
    """
    executor, description = _build(config)
    described.set_result(description)
    return executor


def _build_for_good(config: ExecutorConfig, described: Future[Description]) -> Executor:
    """As `build_executor`, in a process of its own: the garbage collector never walks the modules.

    torch brings 190,000 objects, none of them garbage. Unwatched it is imported 0.1 s sooner, and the collection at the
    end of the start takes 0.1 s less (measured).
    """
    gc.disable()
    try:
        if config.simulate is None:
            import executor_svc.startup.model  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
    return build_executor(config, described)


def _build(config: ExecutorConfig) -> tuple[Executor, Description]:
    # Imported here, because only one of them needs torch.
    if config.simulate is not None:
        from executor_svc.simulated.build import build_simulated

        return build_simulated(config)
    from executor_svc.startup.model import build_model

    return build_model(config)


async def serve(config: ExecutorConfig, report: Callable[[str], None]) -> tuple[int, bool]:
    """Serve until a signal comes; `report` tells the user, in one line, what went wrong.

    Returns the exit code, and whether the device thread has ended: if not, only os._exit ends the process in time.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    server = grpc.aio.server(options=server_options())
    try:
        # Before the model is loaded, so that a taken port is known at once; connections wait until the server starts.
        address = bind(server, config.listen, default_port=EXECUTOR_PORT)
    except OSError as exc:
        report(str(exc))
        return 1, True
    described: Future[Description] = Future()
    worker = Worker(lambda: _build_for_good(config, described))
    worker.start()
    try:
        if await _loaded(stop, worker, report):
            code = await _serve_until(stop, server, worker, described.result(), address, report)
        else:
            code = 0 if stop.is_set() else 1
    finally:
        ended = await _stop(server, worker)
    return code, ended


async def _stop(server: grpc.aio.Server, worker: Worker) -> bool:
    await server.stop(_STOP_GRACE_S)
    return await asyncio.to_thread(worker.stop, _STOP_STEP_S)


async def _loaded(stop: asyncio.Event, worker: Worker, report: Callable[[str], None]) -> bool:
    """Wait for the model; False if it cannot be loaded, or `stop` came first."""
    ready = asyncio.wrap_future(worker.ready)
    await _first_of(stop, ready)
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
    description: Description,
    address: str,
    report: Callable[[str], None],
) -> int:
    """Serve until `stop` or the loss of the device; returns the exit code."""
    await add_services(server, worker, description)
    await server.start()
    # What is loaded lives as long as the process: the collector need not walk it during steps.
    gc.collect()
    gc.freeze()
    print(f"ready {address}", flush=True)
    lost = asyncio.wrap_future(worker.lost)
    await _first_of(stop, lost)
    if stop.is_set():
        _log.info("stopping")
        return 0
    report(f"the device is lost: {lost.result()}")
    return 1


async def _first_of(stop: asyncio.Event, other: asyncio.Future[Any]) -> None:
    """Return when the event is set or the future done."""
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((stopped, other), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
