"""Runs a scheduler, its executors and a gateway as child processes: starts, watches, restarts and stops them."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from cadenza.errors import LocalServiceError, UnavailableError
from cadenza_common.run_files import remove_run, write_run
from cadenza_common.serving.stop_signals import DRAIN_TIMEOUT_S
from cadenza_common.wire.tls import TLS
from cadenza_launcher.services.checks import (
    check_address,
    check_device,
    check_files,
    check_listener,
    check_model,
    check_scaling,
    local_path,
    own_tls,
)
from cadenza_launcher.services.child_process import ChildService, LogSink
from cadenza_launcher.services.executor_hosts import Command, ExecutorHost, ThisMachine
from cadenza_launcher.services.executor_shares import executor_shares
from cadenza_launcher.services.family import Family, Programs
from cadenza_launcher.services.gateway import gateway_listeners, gateway_places
from cadenza_launcher.services.options import (
    GATEWAY,
    SCHEDULER,
    SEVERAL_OPTIONS,
    ServiceArguments,
    Setting,
    ignored_variables,
    route_options,
)
from cadenza_launcher.services.ports import metrics_ports, scheduler_address
from cadenza_launcher.services.supervised_service import RestartPolicy
from cadenza_launcher.services.supervision import end_supervision, start_all, start_watching, stop
from gateway_svc.page_starter import PAGE_TOKEN, page_environment

_logger = logging.getLogger("cadenza.local")

_START_GRACE_S = 0.5
_FAILURE_S = 0.5


class LocalServices:
    """A scheduler and one or several executors on this machine, while this object and this process exist; the executors
    are elsewhere if Ray places them (`distributed_executor_backend="ray"`, docs/ray.md).

    `options` are those of the services, by their names in `executor_svc.config`, `scheduler_svc.config` and
    `gateway_svc.config`, `executors`, and where the gateway listens (`http`, `kserve`, `vllm_grpc`); each option
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
        cancelled: threading.Event | None = None,
        is_one_of_several: bool = False,
        **options: Any,
    ) -> None:
        """cancelled: set by another thread, it ends the start. is_one_of_several: the gateway, and options that
        concern it or the models together, are somebody else's."""

        def routed(name: str) -> ServiceArguments:
            found = route_options(name, options, config=config)
            return found.of_one_model() if is_one_of_several else found

        model = named = check_model(model)
        arguments = routed(model)
        _check(arguments, host, port)
        places = gateway_places(host, port, arguments.listeners, arguments.settings)
        on_log, on_event = on_log or log_line, on_event or _logger.warning
        if programs is None and (path := local_path(model, arguments.settings, on_event)) != model:
            model, arguments = path, routed(path)
        self._tls = own_tls(arguments.settings)
        if programs is None:
            check_files(model, arguments.settings)
        kept = contextlib.ExitStack()
        address = scheduler_address(host, port, kept)
        gateway = gateway_listeners(places, kept)
        executors, metrics_port = _make_host(arguments, programs, kept, on_log, on_event)
        addresses = {SCHEDULER: address}
        if arguments.has_gateway:
            addresses[GATEWAY] = next(iter(gateway.values()), "")
        self._family = Family(
            arguments, executors, programs or Programs(), addresses, gateway, kept, start_timeout_s, stop_grace_s,
            restarts or RestartPolicy(), on_log, on_event, on_back or (lambda service: None), metrics_port, self._tls,
            page_environment(has_page=arguments.has_page, is_demo=bool(arguments.values.get("page_demo"))),
            stopping=cancelled or threading.Event(),
        )  # fmt: skip
        for sentence in () if is_one_of_several else ignored_variables():
            self._family.on_event(sentence)
        # Runs also at exit: no child outlives the program, even if close was not called.
        self._finalizer = weakref.finalize(self, stop, self._family)
        self._start(on_start)
        # For `cadenza ps`, and until `stop` closes what is kept.
        run = {"model": named, "target": self.target, "http": self.http}
        own = {"pids": [*self.pids().values()]} if is_one_of_several else {}
        kept.callback(remove_run, write_run("servers", {**run, **own}))

    def _start(self, on_start: Callable[[Sequence[str]], None] | None) -> None:
        try:
            if on_start is not None:
                on_start(self.executors)
            start_all(self._family)
        except BaseException:
            # Nothing is served yet, and a service may heed SIGTERM only after it has loaded the model.
            self._family.stop_grace_s = min(self._family.stop_grace_s, _START_GRACE_S)
            self.close()
            raise
        start_watching(self._family)

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
        end_supervision(family)
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


def _check(arguments: ServiceArguments, host: str, port: int) -> None:
    """Raises OptionError for options that do not go together."""
    check_address(host, port)
    check_listener(host, arguments.settings)
    check_scaling(arguments.values, arguments.settings)
    for name in SEVERAL_OPTIONS:
        if name in arguments.settings:
            raise arguments.settings[name].refused(name, "it is for several models: `cadenza up A B`")


def _make_host(
    arguments: ServiceArguments,
    programs: Programs | None,
    kept: contextlib.ExitStack,
    on_log: LogSink,
    on_event: Callable[[str], None],
) -> tuple[ExecutorHost, int | None]:
    """Return what runs the executors, and the port of the scheduler's metrics. Raises OptionError."""
    settings = arguments.settings
    command = Command((programs or Programs()).executor, arguments.executor)
    if arguments.uses_ray:
        from cadenza_launcher.on_ray.executors import RayExecutors

        ports = metrics_ports(settings, (), kept)
        return RayExecutors(command, arguments, on_log=on_log, on_event=on_event), ports.get(SCHEDULER)
    if programs is None:
        check_device(settings)
    shares = executor_shares(arguments.executors, settings)
    ports = metrics_ports(settings, list(shares), kept)
    return ThisMachine(command, shares, ports, on_log), ports.get(SCHEDULER)


def log_line(service: str, line: str) -> None:
    """Pass a line of a service's log on to Python's logging: `executor 1` logs to `cadenza.executor.1`."""
    logging.getLogger(f"cadenza.{service.replace(' ', '.')}").info(line)
