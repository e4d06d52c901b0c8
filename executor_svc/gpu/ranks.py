"""The exchanges of one rank on a GPU: collective operations of PyTorch's process group, NCCL's on GPUs.

NCCL does not promise the order in which it adds: so every rank gathers all partial results, and adds them in the order
of ranks with a kernel of its own. All operations are enqueued, and can be captured in CUDA graphs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from executor_svc.device.ranks import RankEmbedding, Share
from executor_svc.gpu.kernels.gpu_kernels import GpuKernels
from executor_svc.gpu.kernels.rank_rows import own_ids, pick_rows, sum_parts
from executor_svc.gpu.kernels.rows import copy_columns

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name since PyTorch 2.13, or before."""
_TIMEOUT = timedelta(minutes=10)
"""Ranks may take so much longer than others to load their weights."""


def join_group(share: Share, memory: int, backend: str) -> None:
    """Begin the process group of all ranks of this machine; this process has no other.

    memory: a descriptor of memory that all ranks share, in which they find each other: no port listens for that.
    backend: nccl, or gloo for tensors of the CPU.
    """
    # Of the interface on which the ranks of one machine open their connections.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"/proc/self/fd/{memory}", share.size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=share.rank, world_size=share.size, timeout=_TIMEOUT)


class GpuRanks:
    """Implements `device.ranks.RankKernels` over the process group, for one stream.

    An operation that a rank has enqueued ends only when all have. So a rank that fails within a step ends its process,
    and with it the replica.
    """

    def __init__(self, share: Share, own: GpuKernels) -> None:
        """own: the kernels of this rank's model."""
        self.share = share
        self._own = own
        self._is_alone = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, what runs takes this rank's own results for those of all: no rank waits for another."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """As in `RankKernels`: that of the model, as the field's sums over ranks have it, for half of the traffic."""
        return dtype

    def sum_partials(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype, name: str = "sum") -> Tensor:
        """As in `RankKernels`."""
        y = self._own.new(f"rank {name}", tuple(x.shape), dtype)
        parts = self._own.new("rank parts", (self.share.size * x.numel(),), x.dtype)
        return self._own.run(y, lambda n: sum_parts(self._gathered(x[:n], parts), bias, y[:n]))

    def embed(self, table: RankEmbedding, first: int, count: int, token_ids: Tensor, scale: float) -> Tensor:
        """As in `RankKernels`."""
        own, size = self._own, self.share.size
        ids = own.new("rank ids", tuple(token_ids.shape), torch.int64)
        own.run(ids, lambda n: own_ids(token_ids[:n], first, count, ids[:n]))
        x = table(ids, scale)
        y = own.new("rank embedded", tuple(x.shape), x.dtype)
        parts = own.new("rank parts", (size * x.numel(),), x.dtype)
        each = first // self.share.rank if self.share.rank else count
        return own.run(y, lambda n: pick_rows(self._gathered(x[:n], parts), token_ids[:n], each, y[:n]))

    def gather_columns(self, x: Tensor, first: int, columns: int) -> Tensor:
        """As in `RankKernels`."""
        own, size = self._own, self.share.size
        (num_rows, width), each = x.shape, -(-columns // size)
        sent = x
        if width < each:  # the last rank has fewer columns, and all must give as many
            sent = own.new_rows("rank columns", num_rows, each, x.dtype)
            own.run(sent, lambda n: copy_columns(x[:n], sent[:n, :width]))
        y = own.new("rank logits", (num_rows, columns), x.dtype)
        if self.share.rank:
            return own.run(y, lambda n: self._gather_to_first(sent[:n]))
        parts = own.new("rank parts of logits", (size * num_rows * each,), x.dtype)

        def run(n: int) -> None:
            gathered = parts[: size * n * each].view(size, n, each)
            self._gather_to_first(sent[:n], gathered)
            for rank, part in enumerate(gathered):
                place = slice(rank * each, min((rank + 1) * each, columns))
                copy_columns(part[:, : place.stop - place.start], y[:n, place])

        return own.run(y, run)

    def check(self) -> None:
        """As in `RankKernels`: a rank that has failed has ended."""

    def fail(self) -> None:
        """As in `RankKernels`: it is for the end of this process to release the others."""

    def reset(self) -> None:
        """As in `RankKernels`: nothing is counted."""

    def share_first(self, *tensors: Tensor) -> None:
        """Give the numbers of rank 0's tensors to all; enqueued."""
        for tensor in tensors:
            if tensor.numel():
                dist.broadcast(tensor, src=0)

    def _gathered(self, x: Tensor, parts: Tensor) -> Tensor:
        """Return the rows x [T, columns] of all ranks, [N, T, columns], in memory `parts`."""
        size, (num_rows, width) = self.share.size, x.shape
        gathered = parts[: size * x.numel()].view(size * num_rows, width)
        if self._is_alone:
            gathered.view(size, num_rows, width).copy_(x)
        else:
            _gather(gathered, x)
        return gathered.view(size, num_rows, width)

    def _gather_to_first(self, x: Tensor, gathered: Tensor | None = None) -> None:
        """Write the rows x of all ranks to `gathered` [N, ...] of rank 0."""
        if not self._is_alone:
            dist.gather(x, None if gathered is None else list(gathered.unbind()), dst=0)
        elif gathered is not None:
            gathered.copy_(x)
