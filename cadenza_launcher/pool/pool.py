"""Starts and stops the services of several models, each as of one model alone, and tells how each is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from cadenza.errors import CadenzaError
from cadenza_launcher.local import LocalServices
from cadenza_launcher.pool.memory import Allowance, kv_bytes, memory_of
from cadenza_launcher.pool.specs import ModelSpec
from gateway_svc.several.wire import LoadState, ModelStatus

_LOG = logging.getLogger(__name__)
_LOOK_S = 1.0
_MEASURE_LOOKS = 5
_ABSENT = (LoadState.UNLOADED, LoadState.FAILED)

Start = Callable[[ModelSpec, threading.Event], LocalServices]
"""Starts a model's services; the event, once set, ends that."""


@dataclass(slots=True)
class _Pooled:
    spec: ModelSpec
    status: ModelStatus
    services: LocalServices | None = None
    thread: threading.Thread | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)


class ModelPool:
    """The processes of several models. `load` and `unload` return at once; `on_status` hears what comes of them."""

    def __init__(
        self,
        specs: tuple[ModelSpec, ...],
        allowances: Mapping[str, Allowance],
        start: Start,
        on_event: Callable[[str], None],
    ) -> None:
        self._start, self._on_event = start, on_event
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self.on_status: Callable[[ModelStatus], None] = lambda status: None
        self._entries = {
            spec.name: _Pooled(
                spec,
                ModelStatus(spec.name, spec.model, memory_bytes=allowances[spec.name].bytes, options=spec.gateway),
            )
            for spec in specs
        }
        self._watcher = threading.Thread(target=self._watch, name="model-pool", daemon=True)
        self._watcher.start()

    def statuses(self) -> list[ModelStatus]:
        """How all models are."""
        with self._lock:
            return [each.status for each in self._entries.values()]

    def pids(self) -> dict[str, int]:
        """Process ids by service and model, such as "executor small"."""
        running = {name: each.services for name, each in self._entries.items() if each.services is not None}
        return {f"{service} {name}": pid for name, each in running.items() for service, pid in each.pids().items()}

    def load(self, name: str) -> None:
        """Start a model's services, unless they are there."""
        with self._lock:
            entry = self._entries[name]
            if self._closing.is_set() or entry.status.state not in _ABSENT:
                self._say(entry)
                return
            entry.cancelled = threading.Event()
            self._set(entry, state=LoadState.LOADING, error="")
            self._run(entry, self._load)

    def unload(self, name: str) -> None:
        """Let a model's scheduler finish its requests, and stop its services."""
        with self._lock:
            entry = self._entries[name]
            if self._closing.is_set() or entry.status.state is not LoadState.LOADED:
                self._say(entry)
                return
            self._set(entry, state=LoadState.UNLOADING, target="")
            self._run(entry, self._unload)

    def drain(self) -> None:
        """Let all schedulers finish their requests, at the same time."""
        self._stop_all(with_drain=True)

    def close(self) -> None:
        """Stop all services at once, those that start too."""
        self._stop_all(with_drain=False)

    # ---------------------------------------------------------------------------------------------------------------

    def _run(self, entry: _Pooled, work: Callable[[_Pooled], None]) -> None:
        entry.thread = threading.Thread(target=work, args=(entry,), name=f"model {entry.spec.name}", daemon=True)
        entry.thread.start()

    def _load(self, entry: _Pooled) -> None:
        try:
            services = self._start(entry.spec, entry.cancelled)
        except CadenzaError as error:
            with self._lock:
                self._set(entry, state=LoadState.FAILED, error=str(error))
            return
        except Exception as error:
            _LOG.exception("the model %s could not be started", entry.spec.name)
            with self._lock:
                self._set(entry, state=LoadState.FAILED, error=repr(error))
            return
        with self._lock:
            entry.services = services
            memory = memory_of(services.pids().values()) + kv_bytes(services)  # it fills as it is used
            self._set(entry, state=LoadState.LOADED, target=services.target, memory_bytes=memory)

    def _unload(self, entry: _Pooled, state: LoadState = LoadState.UNLOADED, error: str = "") -> None:
        services = entry.services
        if services is not None:
            if state is LoadState.UNLOADED:
                services.drain()
            services.close()
        self._on_event(f"{entry.spec.name}: unloaded" if state is LoadState.UNLOADED else f"{entry.spec.name}: {error}")
        with self._lock:
            entry.services = None
            self._set(entry, state=state, target="", error=error)

    def _watch(self) -> None:
        """Notice services that were given up, and what those that run take."""
        looks = 0
        while not self._closing.wait(_LOOK_S):
            looks += 1
            for entry in self._entries.values():
                services = entry.services
                if services is None or entry.status.state is not LoadState.LOADED:
                    continue
                if services.failure is not None:
                    self._unload(entry, LoadState.FAILED, str(services.failure))
                elif looks % _MEASURE_LOOKS == 0:
                    memory = memory_of(services.pids().values())
                    with self._lock:
                        if memory > entry.status.memory_bytes and entry.status.state is LoadState.LOADED:
                            self._set(entry, memory_bytes=memory)

    def _set(self, entry: _Pooled, **changes: object) -> None:
        entry.status = replace(entry.status, **changes)  # type: ignore[arg-type]
        self._say(entry)

    def _say(self, entry: _Pooled) -> None:
        self.on_status(entry.status)

    def _stop_all(self, *, with_drain: bool) -> None:
        self._closing.set()
        stopping = []
        for entry in self._entries.values():
            entry.cancelled.set()
            thread = threading.Thread(target=_stop_one, args=(entry, with_drain), daemon=True)
            thread.start()
            stopping.append(thread)
        for thread in stopping:
            thread.join()


def _stop_one(entry: _Pooled, with_drain: bool) -> None:
    if entry.thread is not None:
        entry.thread.join()
    if (services := entry.services) is not None:
        if with_drain:
            services.drain()
        services.close()
