"""The exchanges of one rank, as launches beside its model's."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from executor_svc.cpu.kernels.codegen.team import KernelLaunch
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.dense_launches import DTYPES, Host
from executor_svc.cpu.kernels.ranks import kernels
from executor_svc.cpu.kernels.ranks.gated_norms import norm_groups
from executor_svc.cpu.kernels.ranks.head_norms import norm_all_heads
from executor_svc.cpu.kernels.ranks.memory import LINE, ExchangeMemory
from executor_svc.device.kernels import AttentionShape, HeadNorms
from executor_svc.device.ranks import RankEmbedding, RankError, Share
from executor_svc.device.states import GatedNormKind

ALL = 1 << 40
"""More rows than there ever are: a launch has one item, and the item does all rows."""


class CpuRanks:
    """Implements `device.ranks.HeadNormRanks` and `GatedNormRanks`."""

    def __init__(self, share: Share, own: CpuKernels, memory: ExchangeMemory) -> None:
        """own: the kernels of this rank's model."""
        assert memory.sizes.num_ranks == share.size
        self.share = share
        self._own = own
        self._memory = memory
        self._number = np.zeros(1, np.int64)
        """Of the last exchange."""

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """As in `RankKernels`."""
        return torch.float32

    def sum_partials(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype, name: str = "sum") -> Tensor:
        """As in `RankKernels`."""
        host, memory, sizes = self._own.host, self._memory, self._memory.sizes
        num_rows, width = x.shape
        assert x.dtype == torch.float32
        assert width <= sizes.hidden_size
        stride, own = width * 4, memory.sums + self.share.rank * sizes.rows_bytes
        give = kernels.give_rows(host.code, "float32", width)
        self._launch(host, num_rows, give, (x.data_ptr(), own, sizes.sums_bytes, stride, self._number_at))
        self._arrive(host, num_rows)
        y = host.new(f"{name}_{width}", (num_rows, width), dtype)
        take = kernels.take_sums(host.code, self.share.size, DTYPES[dtype], width, bias is not None)
        given = memory.sums, sizes.sums_bytes, sizes.rows_bytes, *self._awaited
        self._launch(host, num_rows, take, (*given, y.data_ptr(), 0 if bias is None else bias.data_ptr()))
        return y

    def norm_all_heads(self, qkv: Tensor, norms: HeadNorms, shape: AttentionShape) -> Tensor:
        """As in `HeadNormRanks`."""
        return norm_all_heads(self._own.host, self, qkv, norms, shape)

    def norm_groups(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, kind: GatedNormKind
    ) -> Tensor:
        """As in `GatedNormRanks`."""
        return norm_groups(self._own.host, self, x, gate, weight, eps, groups, kind)

    def embed(self, table: RankEmbedding, first: int, count: int, token_ids: Tensor, scale: float) -> Tensor:
        """As in `RankKernels`."""
        host, memory = self._own.host, self._memory
        num_rows = token_ids.shape[0]
        ids = host.new("own ids", (num_rows,), torch.int64)
        own = token_ids.data_ptr(), ids.data_ptr(), first, count
        self._launch(host, num_rows, kernels.own_ids(host.code), own)
        x = table(ids, scale)
        dtype, width = DTYPES[x.dtype], x.shape[1]
        half, stride = memory.sizes.rows_bytes, width * x.element_size()
        give = kernels.give_own_rows(host.code, dtype, width)
        given = x.data_ptr(), memory.rows, half, stride, self._number_at
        self._launch(host, num_rows, give, (*given, token_ids.data_ptr(), first, count))
        self._arrive(host, num_rows)
        y = host.new("embedded by ranks", (num_rows, width), x.dtype)
        self._take_rows(host, memory.rows, half, y)
        return y

    def gather_columns(self, x: Tensor, first: int, columns: int) -> Tensor:
        """As in `RankKernels`."""
        host, memory, sizes = self._own.host, self._memory, self._memory.sizes
        num_rows, width = x.shape
        assert x.dtype == torch.float32
        assert columns <= sizes.vocab_size
        into = memory.logits + first * 4
        give = kernels.give_rows(host.code, "float32", width)
        given = x.data_ptr(), into, sizes.logits_bytes, columns * 4, self._number_at
        self._launch(host, num_rows, give, given)
        self._arrive(host, num_rows)
        y = host.new("gathered", (num_rows, columns), torch.float32)
        self._take_rows(host, memory.logits, sizes.logits_bytes, y, waits_only=self.share.rank > 0)
        return y

    def check(self) -> None:
        """As in `RankKernels`."""
        failed = self._memory.failed_rank
        if failed is not None:
            raise RankError(f"rank {failed} failed")

    def fail(self) -> None:
        """As in `RankKernels`."""
        self._memory.fail(self.share.rank)

    def reset(self) -> None:
        """As in `RankKernels`."""
        self._number[0] = 0
        if self.share.rank == 0:
            self._memory.reset()

    # ------------------------------------------------------------------

    @property
    def _number_at(self) -> int:
        return int(self._number.ctypes.data)

    @property
    def _awaited(self) -> tuple[int, int, int]:
        return self._number_at, self._memory.arrivals, self._memory.failed

    def _take_rows(self, host: Host, base: int, half: int, y: Tensor, waits_only: bool = False) -> None:
        kernel = kernels.take_rows(host.code, self.share.size, DTYPES[y.dtype], y.shape[1])
        into = 0 if waits_only else y.data_ptr()
        share = ALL if waits_only else 1
        self._launch(host, y.shape[0], kernel, (base, half, *self._awaited, into), share)

    def _arrive(self, host: Host, num_rows: int) -> None:
        own = self._memory.arrivals + self.share.rank * LINE
        self._launch(host, num_rows, kernels.arrive(host.code), (self._number_at, own), ALL)

    def _launch(self, host: Host, num_rows: int, kernel: str, arguments: tuple[int, ...], share: int = 1) -> None:
        host.launch(KernelLaunch(kernel, "rows", share, 1, arguments), num_rows)
