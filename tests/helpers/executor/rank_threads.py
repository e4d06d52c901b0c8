"""The ranks of a model as threads of one process: what processes do, without their start. For tests only."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.ranks.launches import CpuRanks
from executor_svc.cpu.kernels.ranks.linked import LinkedRanks
from executor_svc.cpu.kernels.ranks.memory import ExchangeMemory, ExchangeSizes
from executor_svc.cpu.runner import ModelRunner
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import DraftLayers
from executor_svc.device.ranks import RankKernels, Share
from executor_svc.models.adapters.places import AdapterSizes
from executor_svc.models.loading import LoadedModel, load_model
from executor_svc.models.parallel.split import check_split
from executor_svc.models.specs.spec import DecoderSpec
from executor_svc.plan.limits import Limits
from executor_svc.ranks.adapters import LeaderAdapters, serve_adapters
from executor_svc.ranks.drafts import MemberDrafts
from executor_svc.ranks.hosts.connecting import Connector
from executor_svc.ranks.hosts.credentials import RankCredentials
from executor_svc.ranks.hosts.exchange_links import ExchangeLinks, LeaderExchanges, MemberExchanges
from executor_svc.ranks.hosts.listener import Listener
from executor_svc.ranks.hosts.places import RankPlace
from executor_svc.ranks.links import Link, LinkClosed
from executor_svc.ranks.steps import LeaderRanks, MemberRanks
from executor_svc.startup.executors import make_device
from executor_svc.startup.held import draft_layers_message, layers_beside
from executor_svc.startup.member import follow
from executor_svc.worker.model_adapters import ModelAdapterLoader
from executor_svc.worker.step import StepExecutor
from tests.executor_svc.driver import NUM_THREADS
from tests.helpers.machine.loopback import new_address

Found = TypeVar("Found")


def on_ranks(size: int, work: Callable[[int], Found]) -> list[Found]:
    """Return what each rank makes, all at once; raises the error of the first that fails."""
    with ThreadPoolExecutor(size) as pool:
        return [each.result() for each in [pool.submit(work, rank) for rank in range(size)]]


class Meeting(Protocol):
    """Where the exchanges of ranks happen."""

    def ranks(self, share: Share, kernels: CpuKernels, sizes: ExchangeSizes) -> RankKernels:
        """Return a rank's exchanges."""
        ...

    def close(self) -> None:
        """End what it has opened."""
        ...


class SharedMemory:
    """The memory of exchanges, made by the rank that comes first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: NDArray[np.uint8] | None = None

    def ranks(self, share: Share, kernels: CpuKernels, sizes: ExchangeSizes) -> CpuRanks:
        """Return a rank's exchanges."""
        with self._lock:
            if self._memory is None:
                self._memory = np.zeros(sizes.num_bytes, np.uint8)
        return CpuRanks(share, kernels, ExchangeMemory(self._memory, sizes))

    def close(self) -> None:
        """As in `Meeting`."""


class Connections:
    """Connections over TCP, as between machines."""

    def __init__(self, credentials: RankCredentials | None = None) -> None:
        self._credentials = credentials or RankCredentials()
        self._host = new_address()
        self._listener: Listener | None = None
        self._links: list[ExchangeLinks] = []

    def ranks(self, share: Share, kernels: CpuKernels, sizes: ExchangeSizes) -> LinkedRanks:
        """Return a rank's exchanges, of a session that has begun."""
        place = RankPlace(share.rank, share.size, share.rank, share.size, self._host, 50053)
        links: ExchangeLinks
        if share.rank:
            links = MemberExchanges(Connector(place, self._credentials))
        else:
            self._listener = Listener(place, self._credentials, time.monotonic())
            links = LeaderExchanges(self._listener)
        self._links.append(links)
        found = LinkedRanks(share, kernels, links, sizes)
        found.reset()
        return found

    def close(self) -> None:
        """As in `Meeting`."""
        for links in self._links:
            links.close()
        if self._listener is not None:
            self._listener.close()


def _nothing(_: StepExecutor) -> None:
    pass


@dataclass
class RankModel:
    """One rank's part of a model; as far as it is used, a `tests.executor_svc.driver.Model`."""

    options: dict[str, Any]
    device: Device
    loaded: LoadedModel


@dataclass
class RankThreads:
    """A model that is divided among ranks, and the threads of those after the first."""

    folder: Path
    size: int
    options: dict[str, Any] = field(default_factory=dict)
    adapter_sizes: AdapterSizes | None = None
    """Of places for adapters."""
    prepare: Callable[[StepExecutor], None] = _nothing
    """Called with the executor of each other rank, before its first step."""
    meeting: Meeting = field(default_factory=SharedMemory)

    def __post_init__(self) -> None:
        self.options = {
            "model": str(self.folder), "device": "cpu", "num_gpu_blocks": 64, "num_threads": NUM_THREADS,
            "max_num_batched_tokens": 512, "max_num_seqs": 100, **self.options, "tensor_parallel_size": self.size,
        }  # fmt: skip
        self.models = on_ranks(self.size, self._load)
        self._links: list[Link] = []
        self._threads: list[threading.Thread] = []
        self._adapter_links: list[Link] = []
        self._serving: list[threading.Thread] = []
        self._loaders: list[ModelAdapterLoader | None] = [None] * self.size

    @property
    def first(self) -> RankModel:
        """Rank 0's part."""
        return self.models[0]

    def start(self, config: ExecutorConfig, limits: Limits, draft: DraftLayers | None = None) -> LeaderRanks:
        """Start the other ranks anew, with pools of these sizes; returns rank 0's side of steps.

        draft: of rank 0's draft model or head.
        """
        self._stop_members()
        for rank, model in enumerate(self.models[1:], 1):
            ours, theirs = map(Link, socket.socketpair())
            self._links.append(ours)
            layers = layers_beside(model.loaded, draft_layers_message(draft))
            given = model, config, limits, theirs, self._loaders[rank], self.prepare, layers
            self._threads.append(threading.Thread(target=_follow, args=given))
            self._threads[-1].start()
        ranks = self.first.loaded.ranks
        assert ranks is not None
        leader = LeaderRanks(ranks, self._links)
        leader.clear()
        return leader

    def new_loader(self, most: int) -> LeaderAdapters:
        """Return what loads adapters on all ranks, `most` of them at most; the next `start` uses it."""
        self._stop_loaders()
        for rank, model in enumerate(self.models[1:], 1):
            ours, theirs = map(Link, socket.socketpair())
            assert model.loaded.adapters is not None
            self._loaders[rank] = loader = ModelAdapterLoader(model.loaded.adapters, most)
            self._adapter_links.append(ours)
            self._serving.append(threading.Thread(target=_serve, args=(loader, theirs)))
            self._serving[-1].start()
        assert self.first.loaded.adapters is not None
        return LeaderAdapters(self.first.loaded.adapters, most, self._adapter_links)

    def stop(self) -> None:
        """End the other ranks."""
        self._stop_members()
        self._stop_loaders()

    def _stop_loaders(self) -> None:
        for link in self._adapter_links:
            link.close()
        for thread in self._serving:
            thread.join()
        self._adapter_links, self._serving = [], []

    def _stop_members(self) -> None:
        for link in self._links:
            link.close()
        for thread in self._threads:
            thread.join()
        self._links, self._threads = [], []

    def _load(self, rank: int) -> RankModel:
        config = ExecutorConfig(**self.options)
        device = make_device(config)

        def join(spec: DecoderSpec) -> RankKernels:
            check_split(spec, self.size)
            most = config.max_num_batched_tokens, spec.hidden_size, config.max_num_seqs, spec.vocab_size
            kernels = device.kernels
            assert isinstance(kernels, CpuKernels)
            return self.meeting.ranks(Share(rank, self.size), kernels, ExchangeSizes(self.size, *most))

        return RankModel(self.options, device, load_model(config, device, self.adapter_sizes, join))


def _follow(
    model: RankModel,
    config: ExecutorConfig,
    limits: Limits,
    link: Link,
    loader: ModelAdapterLoader | None,
    prepare: Callable[[StepExecutor], None],
    layers: DraftLayers | None,
) -> None:
    pools = model.device.new_kv_cache(model.loaded.own_geometry, config, draft=layers)
    for layer in (*pools.layers, *pools.layout.views(pools.host)):
        layer.fill_(float("nan"))
    assert model.loaded.ranks is not None
    ranks = MemberRanks(model.loaded.ranks, link)
    runner = ModelRunner(model.loaded.model, model.device, pools, limits, adapters=model.loaded.adapters)
    drafts = MemberDrafts(ranks) if limits.max_drafts else None
    executor = StepExecutor(runner, pools, limits, drafts=drafts, adapters=loader, ranks=ranks)
    prepare(executor)
    with suppress(LinkClosed):
        follow(executor, ranks)
    link.close()


def _serve(loader: ModelAdapterLoader, link: Link) -> None:
    serve_adapters(loader, link)
    link.close()
