"""The gateway process: listen, serve, finish what runs, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from cadenza.errors import CadenzaError, OptionError, UnavailableError
from cadenza_common.serving.connection_limits import allow_connections
from cadenza_common.serving.stop_signals import StopSignals
from gateway_svc.app import make_state
from gateway_svc.config import GatewayConfig
from gateway_svc.kv_events.publisher import KvPublisherError
from gateway_svc.listeners import Listeners
from gateway_svc.page_starter import PageRights
from gateway_svc.several.door import DoorState
from gateway_svc.several.wire import DoorPlace
from gateway_svc.state import State

_LOG = logging.getLogger(__name__)
_CHECK_S = 1.0
"""For which a start waits for the scheduler to say which model it serves, or for the launcher of several models."""
EXIT_OK, EXIT_FAILED, EXIT_OPTIONS = 0, 1, 2


async def serve(
    config: GatewayConfig,
    fail: Callable[[str], None],
    page_rights: PageRights | None = None,
    door: DoorPlace | None = None,
) -> int:
    """Serve until a signal; returns the exit code. page_rights, door: as whoever started this process gives them."""
    signals = StopSignals()
    signals.install()
    allow_connections(2 * config.http_max_requests, "twice --http-max-requests")  # as many again may be idle
    try:
        state = make_state(config, page_rights, door)
        listeners = Listeners(state, door)
    except OptionError as error:
        fail(str(error))
        return EXIT_OPTIONS
    try:
        addresses = await listeners.start()
        await state.long_bodies.start()
    except (OSError, KvPublisherError) as error:
        fail(str(error))
        await listeners.close()
        return EXIT_FAILED
    checks = asyncio.create_task(_wrong_option(state))
    await asyncio.wait({checks}, timeout=_CHECK_S)
    if not checks.done():
        checks.add_done_callback(lambda done: None if done.cancelled() or done.result() is None else signals.stop.set())
    elif (wrong := checks.result()) is not None:
        return await _refuse(wrong, fail, listeners)
    sys.stdout.write(f"ready {next(iter(addresses.values()))}\n")
    sys.stdout.flush()
    urls = listeners.urls
    open_paths = "" if state.keys is None else "; /health, /version and /openapi.json need no key"
    _LOG.info("serving %s at %s%s", config.target, ", ".join(urls), open_paths)
    if config.page:
        shown = "#token=…" if config.page_token_file else f"#token={state.page_rights.token}"
        _LOG.info("the live page is %s/%s", listeners.page_url, shown)
    await signals.stop.wait()
    if checks.done() and (wrong := checks.result()) is not None:
        return await _refuse(wrong, fail, listeners)
    checks.cancel()
    await _stop(listeners, state, signals.at_once, config.drain_timeout_s)
    return EXIT_OK


async def _wrong_option(state: State) -> str | None:
    """What is wrong with an option for the model, once it is known which it is; None: nothing that is known."""
    if isinstance(state, DoorState):
        await state.all.wait_serving()
        return None
    if not state.formats.is_named:
        return None
    while True:
        try:
            return state.formats.error(await state.link.own.model())
        except UnavailableError:
            await asyncio.sleep(_CHECK_S)
        except CadenzaError:  # as of a scheduler that asks for a token
            return None


async def _refuse(wrong: str, fail: Callable[[str], None], listeners: Listeners) -> int:
    fail(wrong)
    await listeners.close()
    return EXIT_OPTIONS


async def _stop(listeners: Listeners, state: State, at_once: asyncio.Event, drain_timeout_s: float) -> None:
    """Take no new requests, and go on with the others for so long, or until `at_once` is set."""
    state.is_stopping = True
    num_running = state.counts.num_running
    if num_running and not at_once.is_set():
        _LOG.info("draining: %d requests go on, for %g s at most", num_running, drain_timeout_s)
    await listeners.refuse()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(drain_timeout_s):
            await _first(at_once.wait(), _idle(state))
    _LOG.info("stopping")
    await listeners.close()


async def _idle(state: State) -> None:
    while state.counts.num_running:  # noqa: ASYNC110  # looked at once, at the end
        await asyncio.sleep(0.05)


async def _first(*waits: Awaitable[Any]) -> None:
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
