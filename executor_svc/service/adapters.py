"""Loads and unloads of adapters on the plan stream: files are read on a thread of their own, while steps run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
from google.rpc import status_pb2

from cadenza.v1 import execution_pb2 as pb
from executor_svc.worker.adapters import AdapterLoader, AdapterRefused, LoadedAdapter
from executor_svc.worker.session import PlanSession
from executor_svc.worker.worker import Worker

_log = logging.getLogger(__name__)
_CODES = {
    "not found": grpc.StatusCode.NOT_FOUND,
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "full": grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_MAX_WAITING = 1024
"""Maximum loads and unloads without an answer; a scheduler has a few."""

Send = Callable[[pb.ExecuteResponse], None]
"""Queues a message for the session's stream; called on the event loop."""


class AdapterDesk:
    """The adapters of one executor, over its sessions. Used on the event loop."""

    def __init__(self, worker: Worker) -> None:
        """worker: its executor is built."""
        self._worker = worker
        loader = self._loader = worker.ready.result().adapters
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="adapters") if loader is not None else None
        self._process: tuple[str, int] | None = None
        """Scheduler id and incarnation of the process that chose the indexes."""
        self._loads: set[Future[LoadedAdapter]] = set()
        self._num_waiting = 0
        self._is_closed = False

    async def open(self, process: tuple[str, int], cleared: asyncio.Future[int]) -> int:
        """Begin a session once its slots are clear; returns the result of `cleared`.

        Loads that have not begun are dropped. The indexes of another process mean other adapters: all are unloaded.
        """
        for load in self._loads:
            load.cancel()
        self._num_waiting = 0
        last_completed = await cleared
        if self._loader is not None and (self._loads or self._process != process):
            # Behind a load that runs: its adapter is listed, or cleared.
            work = self._loader.clear if self._process != process else _nothing
            self._process = None  # until that is done: whoever comes next clears, too
            await asyncio.get_running_loop().run_in_executor(self._pool, work)
        self._process = process
        return last_completed

    def loaded(self) -> list[pb.AdapterLoaded]:
        """Return the loaded adapters for SessionOpened."""
        return [] if self._loader is None else [_loaded(each) for each in self._loader.loaded]

    def take(self, request: pb.ExecuteRequest, session: PlanSession, send: Send) -> str:
        """Begin a load or an unload, which is answered by `send`; returns why it is refused, and the stream ends."""
        is_load = request.HasField("load_adapter")
        index = request.load_adapter.adapter_index if is_load else request.unload_adapter.adapter_index
        if self._loader is None:
            return "the executor has no adapters"
        if not index:
            return "adapter_index must be 1 or more"
        if self._is_closed or session.closed:
            return ""  # nobody waits for an answer: the executor stops, or the session has ended
        if self._num_waiting >= _MAX_WAITING:
            return f"over {_MAX_WAITING} loads and unloads of adapters wait"
        self._num_waiting += 1
        if is_load:
            self._load(self._loader, request.load_adapter, session, send)
        else:
            self._unload(self._loader, index, session, send)
        return ""

    def close(self) -> None:
        """Begin no more loads: the executor stops."""
        self._is_closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, loader: AdapterLoader, message: pb.LoadAdapter, session: PlanSession, send: Send) -> None:
        assert self._pool is not None
        index, name, loop = message.adapter_index, message.name, asyncio.get_running_loop()
        load = self._pool.submit(loader.load, index, name, message.path)
        self._loads.add(load)

        def answer() -> None:
            self._loads.discard(load)
            if load.cancelled() or session.closed:
                return
            self._num_waiting -= 1
            send(pb.ExecuteResponse(adapter_loaded=_answer(index, name, load)))

        load.add_done_callback(lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(answer))

    def _unload(self, loader: AdapterLoader, index: int, session: PlanSession, send: Send) -> None:
        loop = asyncio.get_running_loop()

        def answer() -> None:
            if not session.closed:
                self._num_waiting -= 1
                send(pb.ExecuteResponse(adapter_unloaded=pb.AdapterUnloaded(adapter_index=index)))

        def done() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(answer)

        self._worker.submit_action(session, lambda: loader.unload(index), done)


def _nothing() -> None:
    """Waits for the thread."""


def _loaded(adapter: LoadedAdapter) -> pb.AdapterLoaded:
    return pb.AdapterLoaded(
        adapter_index=adapter.index, content_hash=adapter.content_hash, num_bytes=adapter.num_bytes, rank=adapter.rank
    )


def _answer(index: int, name: str, load: Future[LoadedAdapter]) -> pb.AdapterLoaded:
    """Return the answer to a load that is done: an error of any kind concerns this adapter alone."""
    error = load.exception()
    if error is None:
        return _loaded(load.result())
    if isinstance(error, AdapterRefused):
        _log.warning("adapter %d: %s", index, error)
        code, text = _CODES[error.reason], str(error)
    else:
        _log.error("adapter %s cannot be loaded", name, exc_info=error)
        code, text = grpc.StatusCode.INTERNAL, f"adapter {name}: {type(error).__name__}: {error}"
    number: int = code.value[0]
    return pb.AdapterLoaded(adapter_index=index, error=status_pb2.Status(code=number, message=text))
