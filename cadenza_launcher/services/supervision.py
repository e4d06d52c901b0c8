"""Starts the services of a family, watches and restarts them, and stops them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial

import grpc

from cadenza.calls.short_interrupts import quiet_at_exit
from cadenza.errors import LocalServiceError
from cadenza.v1 import generation_pb2, generation_pb2_grpc
from cadenza_common.wire.tls import TLS
from cadenza_common.wire.transport import sync_channel
from cadenza_launcher.services.child_process import subject, wait_until_ready
from cadenza_launcher.services.family import Family, spawn
from cadenza_launcher.services.options import GATEWAY, SCHEDULER
from cadenza_launcher.services.supervised_service import SupervisedService

_logger = logging.getLogger("cadenza.local")

_WATCH_S = 0.1
_GIVEN_UP_GRACE_S = 2.0
_JOIN_S = 10.0
_PROGRESS_TIMEOUT_S = 1.0


def start_all(family: Family) -> None:
    """Start all services at once and wait until they are ready; the scheduler itself waits for the executors.

    The gateway comes last: its scheduler may have chosen its port.
    """
    children = [spawn(family, service) for service in (*family.host.names, SCHEDULER)]
    for child in children:
        address = wait_until_ready(child, family.start_timeout_s, family.stopping, beside=children)
        family.addresses[child.name] = address
    if GATEWAY in family.addresses:
        children.append(spawn(family, GATEWAY))
        address = wait_until_ready(children[-1], family.start_timeout_s, family.stopping, beside=children)
        family.addresses[GATEWAY] = address
        if family.gateway:
            family.gateway[next(iter(family.gateway))] = address
    family.host.follow(lambda: family.addresses[SCHEDULER], family.tls)


def start_watching(family: Family) -> None:
    """Supervise the services in a thread of its own."""
    family.watcher = threading.Thread(target=_watch, args=(family,), name="cadenza-local", daemon=True)
    family.watcher.start()


def _watch(family: Family) -> None:
    """Supervise all services until `stopping` is set, or the scheduler or the last executor is given up."""
    services = {name: _supervised(family, name) for name in (*family.host.names, SCHEDULER)}
    if GATEWAY in family.addresses:
        services[GATEWAY] = _supervised(family, GATEWAY)
    try:
        while not family.stopping.wait(_WATCH_S):
            _follow_host(family, services)
            _look_at_all(family, services)
    except LocalServiceError as error:
        family.failure = error
        _report(family.on_event, str(error))
        family.failed.set()
        # The streams wait for a service that will not come: ending them must not take long.
        _stop_children(family, min(family.stop_grace_s, _GIVEN_UP_GRACE_S))


def _follow_host(family: Family, services: dict[str, SupervisedService]) -> None:
    """Start an executor for each new name of the host, and stop the executors whose names have gone."""
    names = family.host.names
    for name in names:
        if name not in services:
            spawn(family, name)
            services[name] = _supervised(family, name, is_ready=False)
    for name in [each for each in services if each not in (*names, SCHEDULER, GATEWAY)]:
        del services[name]
        family.addresses.pop(name, None)
        family.children.pop(name).begin_stop()


def _look_at_all(family: Family, services: dict[str, SupervisedService]) -> None:
    """Do what is due; removes a gateway that is given up, or one of several executors, else raises the error."""
    for name, service in list(services.items()):
        try:
            service.look(time.monotonic())
        except LocalServiceError as error:
            num_left = sum(each not in (SCHEDULER, GATEWAY, name) for each in services)
            if name == SCHEDULER or num_left == 0:
                raise
            del services[name], family.children[name]
            if name == GATEWAY:
                _report(family.on_event, f"{error}; there is no gateway any more")
                continue
            family.host.give_up(name)
            _report(family.on_event, f"{error}; {num_left} of {num_left + 1} executors are left")


def _cannot_know() -> bool:
    """Whether a scheduler had completed a step: nobody can say after its death, so its lifetime counts."""
    return False


def _supervised(family: Family, service: str, *, is_ready: bool = True) -> SupervisedService:
    completed_step = _cannot_know
    if service not in (SCHEDULER, GATEWAY):
        scheduler, executor = (partial(_address, family, each) for each in (SCHEDULER, service))
        completed_step = ExecutorProgress(scheduler, executor, family.tls).completed_step
    return SupervisedService(
        subject(service),
        family.children[service],
        time.monotonic(),
        spawn=partial(spawn, family, service),
        policy=family.restarts.of_scheduler() if service in (SCHEDULER, GATEWAY) else family.restarts,
        start_timeout_s=family.start_timeout_s,
        completed_step=completed_step,
        on_event=partial(_report, family.on_event),
        on_back=partial(_is_back, family, service),
        is_ready=is_ready,
    )


def _address(family: Family, service: str) -> str:
    return family.addresses.get(service, "")


def _is_back(family: Family, service: str) -> None:
    family.addresses[service] = family.children[service].address
    _report(family.on_event, f"{subject(service)} is back at {family.addresses[service]}")
    _report(family.on_back, service)


def _report(callback: Callable[[str], None], text: str) -> None:
    """Call a function of the caller's; its errors must not end the supervision."""
    try:
        callback(text)
    except Exception:
        _logger.exception("%r failed with the argument %r", callback, text)


def stop(family: Family) -> None:
    """Stop all services at once, with SIGINT, then SIGKILL; returns when they have exited."""
    if family.owner != os.getpid():
        return  # a forked child exits: the services belong to its parent
    with quiet_at_exit():
        try:
            end_supervision(family)
            _stop_children(family, family.stop_grace_s)
        except (KeyboardInterrupt, SystemExit):  # most likely a second signal, because the first one led here
            _stop_children(family, 0)
            raise
        finally:
            family.host.close()
            family.kept.close()


def end_supervision(family: Family) -> None:
    """Start no service again."""
    family.stopping.set()
    if family.watcher is not None and family.watcher is not threading.current_thread():
        family.watcher.join(timeout=_JOIN_S)


def _stop_children(family: Family, grace_s: float) -> None:
    """Stop the gateway, then the scheduler, so that clients see a shutdown and not a failure of what is behind it."""
    children = dict(family.children)
    if (gateway := children.pop(GATEWAY, None)) is not None:
        gateway.stop(grace_s)
    if (scheduler := children.pop(SCHEDULER, None)) is not None:
        scheduler.stop(grace_s)
    for child in children.values():
        child.begin_stop()
    deadline = time.monotonic() + grace_s
    for child in children.values():
        child.stop(max(0.0, deadline - time.monotonic()))


class ExecutorProgress:
    """Reads the scheduler's GetServerInfo after the death of an executor.

    Until the next session is open, it still describes the process that died. `target` gives the scheduler's address,
    `executor` that of the executor.
    """

    def __init__(self, target: Callable[[], str], executor: Callable[[], str], tls: TLS | None = None) -> None:
        self._target = target
        self._executor = executor
        self._tls = tls
        self._counted = 0

    def completed_step(self) -> bool:
        """Whether the last executor at the address completed a step; True once for each incarnation.

        False if the scheduler does not answer within a second: then the executor counts as one without progress.
        """
        with sync_channel(self._target(), self._tls) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            try:
                info = stub.GetServerInfo(generation_pb2.GetServerInfoRequest(), timeout=_PROGRESS_TIMEOUT_S)
            except grpc.RpcError:
                return False
        for executor in info.executors:
            if executor.target == self._executor() and executor.last_step_id > 0:
                is_new, self._counted = executor.incarnation != self._counted, executor.incarnation
                return is_new
        return False
