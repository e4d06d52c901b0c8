"""Runs a scheduler, its executors and a gateway as child processes: starts, watches, restarts and stops them."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from cadenza.child_process import ChildService, LogSink, subject, wait_until_ready
from cadenza.errors import LocalServiceError, UnavailableError
from cadenza.executor_progress import ExecutorProgress
from cadenza.local_checks import (
    check_address,
    check_files,
    check_listener,
    check_model,
    check_scaling,
    own_tls,
)
from cadenza.local_family import Family, Programs, make_host, spawn
from cadenza.local_gateway import gateway_listeners, gateway_places
from cadenza.local_options import GATEWAY, SCHEDULER, Setting, ignored_variables, route_options
from cadenza.local_ports import scheduler_address
from cadenza.page_starter import PAGE_TOKEN, page_environment
from cadenza.short_interrupts import quiet_at_exit
from cadenza.stop_signals import DRAIN_TIMEOUT_S
from cadenza.supervisor import RestartPolicy, SupervisedService
from cadenza.tls import TLS

_logger = logging.getLogger("cadenza.local")

_WATCH_S = 0.1
_START_GRACE_S = 0.5
_GIVEN_UP_GRACE_S = 2.0
_JOIN_S = 10.0
_FAILURE_S = 0.5


class LocalServices:
    """A scheduler and one or several executors on this machine, while this object and this process exist; the executors
    are elsewhere if Ray places them (`distributed_executor_backend="ray"`, docs/ray.md).

    `options` are those of the services, by their names in `executor_svc.config`, `scheduler_svc.config` and
    `cadenza.gateway.config`, `executors`, and where the gateway listens (`http`, `kserve`, `vllm_grpc`); each option
    goes to the services that have it. Options that are not given may come from the environment, such as
    CADENZA_BLOCK_SIZE, or from the TOML file `config`. Everything is checked before anything is started: an
    OptionError names the option. Then `on_start` gets the executors' names, and `on_log` each line of the services'
    logs. Services are named "scheduler", "gateway" and "executor", or "executor 0", "executor 1" and so on if there
    are several. A LocalServiceError names the service that did not start and the reason. A service that dies later,
    or that a signal has stopped for long, is started again at the same port as `restarts` says. Each such event is
    a line to `on_event`, and `on_back` gets the service's name when it is ready again. After `restarts.max_deaths`
    deaths without progress a service is given up. If it is the scheduler or the last executor, all services are
    stopped, and `failure` is set: calls in flight end with UNAVAILABLE, which `naming_failure` explains. Without a
    gateway the others go on.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        start_timeout_s: float = 1800.0,
        stop_grace_s: float = 10.0,
        restarts: RestartPolicy | None = None,
        config: str | os.PathLike[str] | None = None,
        on_log: LogSink | None = None,
        on_event: Callable[[str], None] | None = None,
        on_back: Callable[[str], None] | None = None,
        on_start: Callable[[Sequence[str]], None] | None = None,
        programs: Programs | None = None,
        **options: Any,
    ) -> None:
        model = check_model(model)
        arguments = route_options(model, options, config=config)
        check_address(host, port)
        check_listener(host, arguments.settings)
        check_scaling(arguments.values, arguments.settings)
        places = gateway_places(host, arguments.listeners, arguments.settings)
        self._tls = own_tls(arguments.settings)
        if programs is None:
            check_files(model, arguments.settings)
        kept = contextlib.ExitStack()
        address = scheduler_address(host, port, kept)
        on_log, on_event = on_log or log_line, on_event or _logger.warning
        gateway = gateway_listeners(places, kept)
        executors, metrics_port = make_host(arguments, programs, kept, on_log, on_event)
        self._family = Family(
            arguments,
            executors,
            programs or Programs(),
            {SCHEDULER: address} | dict.fromkeys([GATEWAY] if gateway else [], next(iter(gateway.values()), "")),
            gateway,
            kept,
            start_timeout_s,
            stop_grace_s,
            restarts or RestartPolicy(),
            on_log,
            on_event,
            on_back or (lambda service: None),
            metrics_port,
            self._tls,
            page_environment(has_page=arguments.has_page, is_demo=bool(arguments.values.get("page_demo"))),
        )
        for sentence in ignored_variables():
            self._family.on_event(sentence)
        # Runs also at exit: no child outlives the program, even if close was not called.
        self._finalizer = weakref.finalize(self, _stop, self._family)
        try:
            if on_start is not None:
                on_start(self.executors)
            _start_all(self._family)
        except BaseException:
            # Nothing is served yet, and a service may heed SIGTERM only after it has loaded the model.
            self._family.stop_grace_s = min(stop_grace_s, _START_GRACE_S)
            self.close()
            raise
        self._family.watcher = threading.Thread(target=_watch, args=(self._family,), name="cadenza-local", daemon=True)
        self._family.watcher.start()

    def __enter__(self) -> LocalServices:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def target(self) -> str:
        """`HOST:PORT` of the scheduler."""
        return self._family.addresses[SCHEDULER]

    @property
    def tls(self) -> TLS | None:
        """How this process connects to the scheduler; None: in plain text."""
        return self._tls

    @property
    def executor_tls(self) -> TLS | None:
        """How executors are connected to; None: in plain text."""
        return self._family.host.tls

    @property
    def addresses(self) -> Mapping[str, str]:
        """`HOST:PORT` by service."""
        return dict(self._family.addresses)

    @property
    def http(self) -> str | None:
        """`HOST:PORT` of the gateway's HTTP; None: there is none."""
        return self._family.addresses.get(GATEWAY) if "http" in self._family.gateway else None

    @property
    def gateway(self) -> Mapping[str, str]:
        """`HOST:PORT` of the gateway's listeners by option: http, kserve, vllm_grpc."""
        return dict(self._family.gateway)

    @property
    def page_url(self) -> str | None:
        """The live page's, with its token unless that is in a file; None: there is no page."""
        if self.http is None or not self._family.arguments.has_page:
            return None
        scheme = "https" if "http_tls_cert" in self.settings else "http"
        token = "" if "page_token_file" in self.settings else f"#token={self._family.page[PAGE_TOKEN]}"
        return f"{scheme}://{self.http}/{token}"

    @property
    def executors(self) -> list[str]:
        """The names of the executors."""
        return list(self._family.host.names)

    @property
    def settings(self) -> Mapping[str, Setting]:
        """The services' options that are not left at their defaults, with the source of each."""
        return self._family.arguments.settings

    @property
    def failure(self) -> LocalServiceError | None:
        """Why the services were stopped for good; None if they were not."""
        return self._family.failure

    def pids(self) -> dict[str, int]:
        """Process ids of this machine by service."""
        return {name: child.pid for name, child in self._family.children.items() if child.pid}

    def wait_failure(self, timeout_s: float) -> bool:
        """Wait until the services have failed for good; returns False if `timeout_s` seconds pass before."""
        return self._family.failed.wait(timeout_s)

    @contextlib.contextmanager
    def naming_failure(self) -> Iterator[None]:
        """In the body, raise `failure` in place of an UnavailableError that a service which was given up has caused."""
        try:
            yield
        except UnavailableError as error:
            # The connection may end shortly before the failure is known.
            if self.wait_failure(_FAILURE_S) and self.failure is not None:
                raise LocalServiceError(self.failure.message) from error
            raise

    def drain(self) -> None:
        """Let gateway and scheduler finish their requests within drain_timeout_s and end; `close` ends the others."""
        family = self._family
        _end_supervision(family)
        setting = self.settings.get("drain_timeout_s")
        timeout_s = DRAIN_TIMEOUT_S if setting is None else float(setting.value)
        until = time.monotonic() + timeout_s + family.stop_grace_s
        for service in (GATEWAY, SCHEDULER):
            if service in family.children:
                child = family.children[service]
                assert isinstance(child, ChildService)
                child.drain(until - time.monotonic())

    def close(self) -> None:
        """Stop all at once, with SIGINT, then SIGKILL; returns when they have exited. A second call does nothing."""
        self._finalizer()


def _start_all(family: Family) -> None:
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
        family.addresses[GATEWAY] = family.gateway[next(iter(family.gateway))] = address
    family.host.follow(lambda: family.addresses[SCHEDULER], family.tls)


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
    """Start the executors that have come to the host's names, and stop those that have gone from them."""
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


def _stop(family: Family) -> None:
    if family.owner != os.getpid():
        return  # a forked child exits: the services belong to its parent
    with quiet_at_exit():
        try:
            _end_supervision(family)
            _stop_children(family, family.stop_grace_s)
        except (KeyboardInterrupt, SystemExit):  # most likely a second signal, because the first one led here
            _stop_children(family, 0)
            raise
        finally:
            family.host.close()
            family.kept.close()


def _end_supervision(family: Family) -> None:
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


def log_line(service: str, line: str) -> None:
    """Pass a line of a service's log on to Python's logging: `executor 1` logs to `cadenza.executor.1`."""
    logging.getLogger(f"cadenza.{service.replace(' ', '.')}").info(line)
