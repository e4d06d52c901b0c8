"""The scheduler process: bind, load the tokenizer while the executor loads its model, serve, drain, stop.

SIGTERM drains it: it takes no new requests and goes on with the others for --drain-timeout-s. When it stops, open
streams end with UNAVAILABLE, so that clients can distinguish them from finished ones and retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import signal
import uuid
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cadenza.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from cadenza_common.metrics.listener_counts import SCHEDULER_REFUSALS, ListenerCounts
from cadenza_common.serving.call_limits import CallLimits
from cadenza_common.serving.connection_limits import allow_connections, start_peer_limit
from cadenza_common.serving.health_servicer import HealthServicer
from cadenza_common.serving.stop_signals import StopSignals
from cadenza_common.telemetry.otlp import Traces, TracesError
from cadenza_common.wire.tls.files import TlsError
from cadenza_common.wire.tls_server import credentials_of
from cadenza_common.wire.transport import MAX_RECEIVED_BYTES, SCHEDULER_PORT, bind, server_options
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.errors import LimitsError
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.journal import JournalUnavailableError
from scheduler_svc.executors.addresses import executor_entries
from scheduler_svc.executors.client import GrpcExecutor
from scheduler_svc.executors.discovery import Discovery
from scheduler_svc.front.adapter_paths import restore_adapters
from scheduler_svc.front.admin import AdminServicer
from scheduler_svc.front.front import Front
from scheduler_svc.front.generation import GenerationServicer
from scheduler_svc.front.interceptors import PreparedResponses, TokenGate
from scheduler_svc.front.metrics import SchedulerMetrics
from scheduler_svc.front.model_front import ModelFront
from scheduler_svc.front.process_memory import release_free_memory, shorten_collections
from scheduler_svc.front.unreadable import UnreadableMessages
from scheduler_svc.journal.directory import JournalError
from scheduler_svc.journal.journal import SchedulerJournal, connect
from scheduler_svc.links import executor_files, front_files
from scheduler_svc.plan_loop.clock import SystemClock
from scheduler_svc.plan_loop.ports import ExecutorFencedError, ExecutorLostError, ExecutorPort, ModelDescription
from scheduler_svc.recording.recording import recorded_core
from scheduler_svc.requests.builder import RequestBuilder
from scheduler_svc.requests.chats.option import ChatTemplateOptionError
from scheduler_svc.requests.tokenizer import Tokenizer, TokenizerError
from scheduler_svc.tenants.errors import TenantsFileError
from scheduler_svc.tenants.quotas import Quotas
from scheduler_svc.tenants.registry import Registry

_LOG = logging.getLogger(__name__)
_STOP_GRACE_S = 0.5

_NO_TOKENIZER = (
    "the model has no tokenizer: requests must send token ids, as `cadenza generate --ids 5,6,7` does; "
    "--tokenizer names one"
)
EXIT_OK, EXIT_FAILED, EXIT_OPTIONS, EXIT_FENCED = 0, 1, 2, 3
_SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
)


class Service:
    """The scheduler service on one event loop."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Raises JournalError, TenantsFileError, TracesError, ChatTemplateOptionError, and TlsError for the files of
        the links to executors."""
        self._config = config
        self._executor_files = executor_files(config)
        self._peer_limit: asyncio.Task[None] | None = None
        clock = SystemClock()
        self._clock = clock
        self._tenants = Registry(config.tenants)
        self._journal: SchedulerJournal | None = None
        if config.journal is not None:
            sets_aside = config.journal_damage == "set-aside"
            self._journal = SchedulerJournal(
                config.journal, clock, restart_grace_s=config.restart_grace_s, sets_aside=sets_aside
            )
        self._scheduler_id = uuid.uuid4().hex if self._journal is None else self._journal.scheduler_id
        self._ports: list[GrpcExecutor] = []
        self._recording = ExitStack()
        core, self._record = self._recording.enter_context(recorded_core(config))
        writer = None if self._journal is None else self._journal.writer
        self._traces: Traces | None = None
        if config.otlp_traces_endpoint is not None:
            about = {"version": _version(), "instance": self._scheduler_id}
            self._traces = Traces(config.otlp_traces_endpoint, "cadenza-scheduler", **about)
        core.set_weights(self._tenants.weights)
        self._tenants.add_listener(lambda: core.set_weights(self._tenants.weights))
        self._following: asyncio.Task[None] | None = None
        quotas = Quotas(self._tenants, clock, config.max_queued_requests)
        self._engine = Engine(
            config,
            core,
            clock,
            connect=self._connect,
            release_memory=release_free_memory,
            journal=writer,
            spans=self._traces,
            quotas=quotas,
        )
        self._discovery = Discovery(self._engine.executors, executor_entries(config.executor))
        if writer is not None:
            connect(writer, self._engine)
        self._front = Front(self._engine, config, version=_version())
        self._health = HealthServicer(list(_SERVICES), lambda: self._front.unserved)
        self._model = ModelFront(self._front, config)
        self._listener = ListenerCounts(SCHEDULER_REFUSALS)
        self._metrics = SchedulerMetrics(self._front, self._ports, self._listener)
        self._server = self._make_server()

    def _make_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(
            interceptors=[
                TokenGate(self._tenants, self._listener),
                CallLimits(counts=self._listener),
                UnreadableMessages(),
                PreparedResponses(),
            ],
            options=server_options(max_received_bytes=MAX_RECEIVED_BYTES, max_connections=self._config.max_connections),
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(self._front), server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(self._front, self._metrics), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection((*_SERVICES, health, reflection.SERVICE_NAME), server)
        return server

    async def start(self) -> str:
        """Bind and listen; health is NOT_SERVING and calls get UNAVAILABLE. Returns the address.

        Raises OSError, TlsError.
        """
        files = front_files(self._config)
        allow_connections(self._config.max_connections)
        address = bind(
            self._server, self._config.listen, default_port=SCHEDULER_PORT, credentials=credentials_of(files)
        )
        self._front.address = address
        self._metrics.start({"listener": files, "executors": self._executor_files})
        self._peer_limit = start_peer_limit(address, self._config.max_connections_per_peer, self._listener)
        await self._server.start()
        self._following = asyncio.create_task(self._tenants.follow(self._clock), name="tenants-file")
        return address

    def _connect(self, executor_id: int, target: str) -> ExecutorPort:
        port = GrpcExecutor(target, self._scheduler_id, tls=self._executor_files)
        self._ports.append(port)
        return self._record(executor_id, port)

    def reload_executors(self, executor: list[str]) -> None:
        """Follow these entries of --executor from now on, and read the files that they name again."""
        self._discovery.reload(executor_entries(executor))

    def reload_tenants(self) -> None:
        """Read the tenants file again if it has changed, without waiting for the next look at it."""
        self._tenants.reload()

    async def open(self) -> None:
        """Wait for an executor, load the tokenizer, restore requests, accept calls.

        Raises LimitsError, ExecutorLostError, TokenizerError, JournalError.
        """
        executors = "the executor" if len(self._config.executor) == 1 else "the executors"
        _LOG.info("connecting to %s at %s", executors, ", ".join(self._config.executor))
        self._discovery.start()
        starting = asyncio.create_task(self._engine.start())
        try:
            await self._model.preload()
            await starting
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        restore = None if self._journal is None else self._restore
        await self._model.open(self._engine.served_model, lambda: self._engine.model, restore=restore)
        self._log_choices()
        self._engine.add_health_listener(self._health.set)
        self._health.set(self._engine.healthy)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`; raises the engine's failure if it stopped by itself."""
        await _wait_for_any(stop.wait(), self._engine.fenced.wait())
        if self._engine.failure is not None and not stop.is_set():
            raise self._engine.failure

    async def drain(self, at_once: asyncio.Event) -> None:
        """Go on with the requests and take no new ones: for --drain-timeout-s, or until `at_once` is set.

        Readers that are slower than their requests have the rest of the time. Returns also when the engine fails.
        """
        until = asyncio.get_running_loop().time() + self._config.drain_timeout_s
        self._front.is_leaving = True
        idle = asyncio.create_task(self._engine.drain(None))
        count = self._engine.num_unfinished
        if count and not at_once.is_set():
            going_on = _counted(count, "goes on", "go on")
            _LOG.info("draining: %s, for %g s at most", going_on, self._config.drain_timeout_s)
        await _wait_for_any(
            at_once.wait(), self._engine.fenced.wait(), idle, asyncio.sleep(self._config.drain_timeout_s)
        )
        idle.cancel()
        _LOG.info("stopping%s", self._stop_detail())
        if self._engine.num_unfinished or at_once.is_set():
            return
        with contextlib.suppress(JournalUnavailableError):
            await self._engine.journal.flushed()
        self._health.stop()
        self._front.stop()
        grace_s = max(_STOP_GRACE_S, until - asyncio.get_running_loop().time())
        await _wait_for_any(at_once.wait(), self._server.stop(grace_s))

    def _stop_detail(self) -> str:
        """What the service says about the requests that it leaves; empty: it leaves none."""
        count = self._engine.num_unfinished
        if not count:
            return ""
        if self._journal is not None:
            return f": {_counted(count, 'goes on', 'go on')} in the next process with this --journal"
        return f": {_counted(count, 'is lost', 'are lost')}, since there is no --journal"

    async def stop(self) -> None:
        """Update health, end the streams, close the server, the sessions and the channels; safe at any time."""
        self._health.stop()
        if self._peer_limit is not None:
            self._peer_limit.cancel()
        if self._journal is not None:
            # First: the streams end next, and their requests are to go on in the next process.
            await self._journal.close_writer()
        self._front.stop(self._stop_detail())
        self._metrics.stop()
        await self._server.stop(_STOP_GRACE_S)
        if self._following is not None:
            self._following.cancel()
        await self._discovery.stop()
        await self._engine.stop()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)
        self._recording.close()
        for port in self._ports:
            await port.aclose()
        self._model.close()
        if self._journal is not None:
            self._journal.unlock()

    async def _restore(self, builder: RequestBuilder) -> None:
        assert self._journal is not None
        restore_adapters(self._engine.adapters, await self._journal.adapters(), self._config.lora_root)
        self._engine.executors.wake()
        allows = self._config.allow_fingerprint_change
        await self._journal.restore(self._engine, builder, allow_fingerprint_change=allows)

    def _log_choices(self) -> None:
        model, tokenizer, config = self._engine.model, self._model.tokenizer, self._config
        _log_model(model, tokenizer, self._model.max_model_len)
        if tokenizer is None and not config.skip_tokenizer_init:
            _LOG.warning("%s", _NO_TOKENIZER)
        if config.lora and not model.max_loras:
            _LOG.warning("--lora: the executor has no LoRA adapters; requests that name one are refused")
        if config.preemption != "recompute" and not model.num_host_blocks:
            _LOG.warning("--preemption %s: the executor has no host blocks (--num-cpu-blocks)", config.preemption)


async def serve(
    config: SchedulerConfig,
    report: Callable[[str], None],
    reread: Callable[[], SchedulerConfig | None] | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code. `report` prints an error to the user, in one line.

    reread: reads the options again, for SIGHUP; None if they are wrong, after it has reported that.
    """
    signals = StopSignals()
    signals.install()
    try:
        service = Service(config)
    except JournalError as exc:
        report(f"--journal {exc}")
        return EXIT_FAILED
    except TracesError as exc:
        report(str(exc))
        return EXIT_FAILED
    except TenantsFileError as exc:
        report(f"--tenants {exc}")
        return EXIT_FAILED
    except ChatTemplateOptionError as exc:
        report(f"--chat-template: {exc}")
        return EXIT_OPTIONS
    except TlsError as exc:
        report(str(exc))
        return EXIT_OPTIONS
    try:
        address = await service.start()
        if reread is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, service, reread)
        if await _open_unless_stopped(service, signals.stop):
            shorten_collections()
            print(f"ready {address}", flush=True)
            await service.run(signals.stop)
            await service.drain(signals.at_once)
        return EXIT_OK
    except TlsError as exc:
        report(str(exc))
        return EXIT_OPTIONS
    except (OSError, TokenizerError, LimitsError, JournalError) as exc:
        report(str(exc))
    except ExecutorFencedError as exc:
        executors = ", ".join(config.executor)
        report(f"executor {executors}: {exc}; another scheduler uses it, so this one stops")
        return EXIT_FENCED
    except ExecutorLostError as exc:
        report(f"executor {', '.join(config.executor)}: {exc}")
    except Exception as exc:
        _LOG.exception("the service failed")
        report(f"{type(exc).__name__}: {exc}")
    finally:
        await service.stop()
    return EXIT_FAILED


def _reload(service: Service, reread: Callable[[], SchedulerConfig | None]) -> None:
    """Handle SIGHUP."""
    service.reload_tenants()
    config = reread()
    if config is not None:
        service.reload_executors(config.executor)


async def _open_unless_stopped(service: Service, stop: asyncio.Event) -> bool:
    """Wait until the service is open; False if `stop` was set first."""
    opening = asyncio.create_task(service.open())
    try:
        await _wait_for_any(stop.wait(), opening)
        if stop.is_set():
            return False
        opening.result()
        return True
    finally:
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)


async def _wait_for_any(*work: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> None:
    """Return when one of them is done; the others are cancelled, except tasks, which go on."""
    tasks = [each if isinstance(each, asyncio.Task) else asyncio.create_task(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, each in zip(tasks, work, strict=True):
            if task is not each:
                task.cancel()


def _counted(count: int, verb: str, verbs: str) -> str:
    return f"{count} unfinished request {verb}" if count == 1 else f"{count} unfinished requests {verbs}"


def _version() -> str:
    try:
        return importlib.metadata.version("cadenza")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def _log_model(model: ModelDescription, tokenizer: Tokenizer | None, max_model_len: int) -> None:
    _LOG.info(
        "serving %s (%s, %s) on %s: vocabulary %d, max_model_len %d, %d KV blocks of %d tokens, tokenizer %s",
        model.name, model.architecture, model.dtype, model.device, model.vocab_size, max_model_len,
        model.num_device_blocks, model.block_size, tokenizer.source if tokenizer is not None else "none",
    )  # fmt: skip
    # The last token of a sequence needs no KV.
    longest = model.num_kv_tokens + 1
    if longest < max_model_len:
        _LOG.warning(
            "the longest request that fits into %d KV blocks has %d tokens, prompt (at most %d) and output together, "
            "though max_model_len is %d: an output ends there with KV_CAPACITY; give more --num-gpu-blocks, or a "
            "smaller --max-model-len",
            model.num_device_blocks, longest, longest - 2, max_model_len,
        )  # fmt: skip
