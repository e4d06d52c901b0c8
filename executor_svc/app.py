"""The executor as a process: bind, load on the device thread, serve, stop."""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import logging
import secrets
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import grpc
import torch

from cadenza.transport import EXECUTOR_PORT, MAX_MESSAGE_BYTES, PROTOCOL_VERSION, bind, server_options
from executor_svc.config import ExecutorConfig
from executor_svc.convert import Description
from executor_svc.device import DeviceError, make_device
from executor_svc.loader import LoaderError, load_model
from executor_svc.model_runner import ModelRunner
from executor_svc.numerics import fingerprint
from executor_svc.plan import Limits
from executor_svc.servicer import add_services
from executor_svc.step import StepExecutor
from executor_svc.worker import Worker

_log = logging.getLogger(__name__)

# How long a stop waits for streams and then for the running step.
_STOP_GRACE_S = 0.2
_STOP_STEP_S = 1.5
# A top logprob in a result: a float, and an id of up to 21 bits; with some room for the rest of the result.
_LOGPROB_BYTES = 8


def build_executor(config: ExecutorConfig, described: Future[Description]) -> StepExecutor:
    """Load the model and make everything that computes; to run on the device thread.

    Puts the description into `described`; raises LoaderError or DeviceError, whose messages are for the user.
    """
    began = time.monotonic()
    device = make_device(config)
    torch.set_num_threads(device.num_threads)
    loaded = load_model(config, device)
    geometry = loaded.geometry
    _log.info(
        "model %s: %s, %d parameters, %s, %d bytes, vocabulary %d, max_model_len %d",
        geometry.name, geometry.architecture, geometry.num_parameters, geometry.dtype, geometry.weight_bytes,
        geometry.vocab_size, geometry.max_model_len,
    )  # fmt: skip
    pools = device.new_kv_cache(geometry, config)
    prints = fingerprint(config, loaded, device, pools)
    limits = Limits(
        # As many spare slots as sequences: all of a batch may end in one step and be replaced in the next.
        num_slots=2 * config.max_num_seqs,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=geometry.max_model_len,
        vocab_size=geometry.vocab_size,
        # All sequences of a step may ask for as many, and their result is one message.
        max_logprobs=min(geometry.vocab_size, MAX_MESSAGE_BYTES // (_LOGPROB_BYTES * config.max_num_seqs)),
        block_size=pools.block_size,
        num_device_blocks=pools.num_device_blocks,
        num_host_blocks=pools.num_host_blocks,
        max_inflight_plans=config.max_inflight_plans,
    )
    _log.info(
        "device %s: %d threads, numerics %s, KV blocks of %d tokens: %d on the device, %d on the host, %d bytes each",
        device.name, device.num_threads, prints.mode, limits.block_size, limits.num_device_blocks,
        limits.num_host_blocks, pools.bytes_per_block,
    )  # fmt: skip
    _log.info("loaded in %.1f s; fingerprint %s", time.monotonic() - began, prints.digest.hex()[:16])
    described.set_result(
        Description(
            protocol_version=PROTOCOL_VERSION,
            # Never 0, which would read as absent.
            incarnation=secrets.randbelow(2**64 - 1) + 1,
            loaded=loaded,
            limits=limits,
            bytes_per_block=pools.bytes_per_block,
            fingerprint=prints,
            device=device.name,
            version=importlib.metadata.version("cadenza"),
        )
    )
    return StepExecutor(ModelRunner(loaded, device, pools), pools, limits)


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
    worker = Worker(lambda: build_executor(config, described))
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
    except (LoaderError, DeviceError) as exc:
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
