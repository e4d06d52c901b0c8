"""Several models behind one gateway: the processes of each are its own, and the gateway asks for them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

from cadenza.errors import OptionError
from cadenza_common.run_files import remove_run, write_run
from cadenza_common.settings.starter import StarterConfig
from cadenza_common.wire.transport import format_address
from cadenza_launcher.local import LocalServices
from cadenza_launcher.pool.channel import PoolChannel
from cadenza_launcher.pool.memory import GIB, Allowance, allowances, free_memory
from cadenza_launcher.pool.pool import ModelPool
from cadenza_launcher.pool.specs import ModelSpec, check_common, read_specs
from cadenza_launcher.services.checks import check_address, check_files, check_known, check_listener, count_gpus
from cadenza_launcher.services.child_process import ChildService, LogSink, wait_until_ready
from cadenza_launcher.services.executor_hosts import spawn_child
from cadenza_launcher.services.gateway import gateway_arguments, gateway_listeners, gateway_places
from cadenza_launcher.services.options import (
    GATEWAY,
    SEVERAL_OPTIONS,
    ServiceArguments,
    ignored_variables,
    read_model_tables,
    route_options,
)
from cadenza_launcher.services.ports import reserve_port
from cadenza_launcher.services.supervised_service import RestartPolicy, SupervisedService
from gateway_svc.several.wire import Bounds, DoorPlace

_HTTP_PORT = "8000"
_NO_MODEL = "several/models"
"""Where options are read before the models are known."""
_WATCH_S = 0.1
_JOIN_S = 10.0


def are_several(named: list[str], config: str | os.PathLike[str] | None, options: Mapping[str, Any]) -> bool:
    """Whether `cadenza up` is given several models, or options that concern them; raises OptionError."""
    if len(named) > 1 or read_model_tables(config):
        return True
    given = {name: options.get(name) for name in SEVERAL_OPTIONS}
    found = route_options(named[0] if named else _NO_MODEL, given, config=config).settings
    return any(name in found for name in SEVERAL_OPTIONS)


class SeveralModels:
    """A gateway and the models behind it, while this object and this process exist; `options` as of LocalServices.

    No model is loaded until a request names it. Raises OptionError before anything starts, and LocalServiceError if the
    gateway does not.
    """

    def __init__(
        self,
        named: list[str],
        *,
        host: str,
        port: int,
        on_log: LogSink,
        on_event: Callable[[str], None],
        config: str | os.PathLike[str] | None = None,
        start_timeout_s: float = 1800.0,
        stop_grace_s: float = 10.0,
        **options: Any,
    ) -> None:
        tables = read_model_tables(config)
        common = route_options(named[0] if named else _NO_MODEL, options, config=config)
        starter = StarterConfig(**{name: s.value for name, s in common.settings.items() if name in SEVERAL_OPTIONS})
        self.specs = read_specs(named, starter.models_dir, tables)
        check_common(common.settings)
        ours = (*SEVERAL_OPTIONS, "http")
        self._options = {name: each for name, each in options.items() if name not in ours and each is not None}
        self._on_log, self._on_event, self._config = on_log, on_event, config
        self._start_timeout_s, self._stop_grace_s = start_timeout_s, stop_grace_s
        self.bounds, self._allowances = self._budget(starter, common)
        check_address(host, port)
        check_listener(host, common.settings)
        for spec in self.specs:
            settings = self._routed(spec).settings
            check_files(spec.model, settings)
            check_known(spec.model, settings)
        self._kept = contextlib.ExitStack()
        places = gateway_places(host, port, {"http": _HTTP_PORT} | common.listeners, common.settings)
        self._listeners = gateway_listeners(places, self._kept)
        for sentence in ignored_variables():
            on_event(sentence)
        self.target = reserve_port(host, self._kept) if port == 0 else format_address(host, port)
        self._pool = ModelPool(self.specs, self._allowances, self._start, on_event)
        self._channel = PoolChannel(self._pool, self.bounds)
        self._arguments = [*common.gateway, *gateway_arguments(self.target, self._listeners)]
        self._stopping = threading.Event()
        self._gateway = self._spawn()
        try:
            self.http = wait_until_ready(self._gateway, start_timeout_s, self._stopping)
        except BaseException:
            self.close()
            raise
        names = f"{len(self.specs)} models: {', '.join(spec.name for spec in self.specs)}"
        self._kept.callback(
            remove_run, write_run("servers", {"model": names, "target": self.target, "http": self.http})
        )
        self._watcher = threading.Thread(target=self._watch, name="several-models", daemon=True)
        self._watcher.start()

    def __enter__(self) -> SeveralModels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def need(self, name: str) -> int:
        """The bytes of memory that a model counts as."""
        return self._allowances[name].bytes

    def pids(self) -> dict[str, int]:
        """Process ids: of the gateway, and of each model's services, such as "executor small"."""
        return {GATEWAY: self._gateway.pid, **self._pool.pids()}

    def drain(self) -> None:
        """Let the gateway, then the schedulers, finish their requests."""
        self._end_supervision()
        self._gateway.drain(self._stop_grace_s + 30.0)
        self._pool.drain()

    def close(self) -> None:
        """Stop all at once; a second call does nothing."""
        self._end_supervision()
        self._gateway.stop(self._stop_grace_s)
        self._pool.close()
        self._channel.close()
        self._kept.close()

    # ---------------------------------------------------------------------------------------------------------------

    def _budget(self, starter: StarterConfig, common: ServiceArguments) -> tuple[Bounds, dict[str, Allowance]]:
        """What all may take, and each of them."""
        device = str(common.settings["device"].value) if "device" in common.settings else "auto"
        on_gpu = device != "cpu" and "simulate" not in common.settings and count_gpus() > 0
        free = free_memory()
        budget = free if starter.models_memory is None else int(starter.models_memory * GIB)
        plain = {name: setting.value for name, setting in common.settings.items()}
        found = allowances(self.specs, plain, budget, max(1, free))
        for name, each in found.items():
            if budget and not on_gpu and each.bytes > budget:
                most = f"--models-memory is {budget / GIB:.2f} GiB" if starter.models_memory else "less is free here"
                raise OptionError(f"option model: {name} needs {each.bytes / GIB:.2f} GiB at least, and {most}")
        if on_gpu:
            found = {name: Allowance(each.bytes) for name, each in found.items()}
        bounds = Bounds(
            0 if on_gpu else budget,
            starter.models_max or (1 if on_gpu else 0),
            starter.unload_after or 0.0,
            starter.load_timeout_s,
        )
        return bounds, found

    def _own_options(self, spec: ModelSpec) -> dict[str, Any]:
        share = self._allowances[spec.name].kv_share
        own = {} if share is None else {"gpu_memory_utilization": f"{share:.4g}"}
        return {**own, **self._options, **spec.options}

    def _routed(self, spec: ModelSpec) -> ServiceArguments:
        try:
            return route_options(spec.model, self._own_options(spec), config=self._config)
        except OptionError as error:
            raise OptionError(f"model {spec.name}: {error}") from None

    def _start(self, spec: ModelSpec, cancelled: threading.Event) -> LocalServices:
        began = time.monotonic()
        self._on_event(f"{spec.name}: loading {spec.model}")
        services = LocalServices(
            spec.model,
            config=self._config,
            start_timeout_s=self._start_timeout_s,
            stop_grace_s=self._stop_grace_s,
            on_log=lambda service, line: self._on_log(f"{service} {spec.name}", line),
            on_event=lambda text: self._on_event(f"{spec.name}: {text}"),
            cancelled=cancelled,
            is_one_of_several=True,
            **self._own_options(spec),
        )
        self._on_event(f"{spec.name}: loaded in {time.monotonic() - began:.1f} s")
        return services

    def _spawn(self) -> ChildService:
        place = DoorPlace(self._channel.path, self.target)
        self._gateway = spawn_child(GATEWAY, ("-m", "gateway_svc"), self._arguments, self._on_log, place.environment())
        return self._gateway

    def _watch(self) -> None:
        """Start the gateway again when it dies; the models go on without it."""
        service = SupervisedService(
            "the gateway",
            self._gateway,
            time.monotonic(),
            spawn=self._spawn,
            policy=RestartPolicy(max_deaths=None).of_scheduler(),
            start_timeout_s=self._start_timeout_s,
            completed_step=lambda: False,
            on_event=self._on_event,
            on_back=partial(self._on_event, "the gateway is back"),
        )
        while not self._stopping.wait(_WATCH_S):
            service.look(time.monotonic())

    def _end_supervision(self) -> None:
        self._stopping.set()
        watcher = getattr(self, "_watcher", None)
        if watcher is not None:
            watcher.join(timeout=_JOIN_S)
