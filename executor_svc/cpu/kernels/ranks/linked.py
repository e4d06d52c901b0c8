"""The exchanges of a rank whose memory the others cannot see: rows go over connections, by way of rank 0.

Sending and receiving are launches of the recorded program: they call back into Python, which alone can speak TLS.
Rank 0 takes the parts of all, and computes with the kernels that ranks with shared memory have: so the bits are the
same.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import Emitter, Int
from executor_svc.cpu.kernels.codegen.team import KernelLaunch
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.dense_launches import DTYPES, Host
from executor_svc.cpu.kernels.ranks import kernels
from executor_svc.cpu.kernels.ranks.gated_norms import norm_groups
from executor_svc.cpu.kernels.ranks.head_norms import norm_all_heads
from executor_svc.cpu.kernels.ranks.launches import ALL
from executor_svc.cpu.kernels.ranks.memory import LINE, ExchangeSizes
from executor_svc.device.kernels import AttentionShape, HeadNorms
from executor_svc.device.ranks import RankEmbedding, RankError, Share
from executor_svc.device.states import GatedNormKind
from executor_svc.ranks.hosts.exchange_links import ExchangeLinks
from executor_svc.ranks.links import Frame, LinkClosed

_SEND, _RECEIVE = 0, 1
_I64 = ir.IntType(64)
_Transfer = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


def transfer(code: Code) -> str:
    """Add the kernel that calls a C function (int64 what, rank, address, bytes); returns its name.

    Items: one. Arguments: rows; the function; what; rank; address; bytes of a row.
    """

    def body(
        emit: Emitter,
        _: Int,
        __: Int,
        rows: Int,
        function: Int,
        what: Int,
        rank: Int,
        address: Int,
        row_bytes: Int,
    ) -> None:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 4).as_pointer()
        arguments = what, rank, address, rows * row_bytes
        emit.builder.call(emit.builder.inttoptr(function.value, kind), [each.value for each in arguments])

    return code.kernel("rank_transfer", 6, body)


class LinkedRanks:
    """Implements `device.ranks.HeadNormRanks` and `GatedNormRanks`."""

    def __init__(self, share: Share, own: CpuKernels, links: ExchangeLinks, sizes: ExchangeSizes) -> None:
        """own: the kernels of this rank's model."""
        self.share = share
        self._own, self._links = own, links
        self._failure: str | None = None
        # Kept: launches hold its address.
        self._callback = _Transfer(self._run)
        self._callback_at = ctypes.cast(self._callback, ctypes.c_void_p).value or 0
        # Of the first exchange of all, at which everyone has arrived: kernels that wait do not.
        self._arrived = np.zeros(LINE // 8 * (share.size + 2), np.int64)
        self._part_bytes = max(sizes.rows_bytes, sizes.max_logits * len(share.of(sizes.vocab_size)) * 4)
        num_bytes = share.size * self._part_bytes if share.rank == 0 else 0
        self._parts = torch.zeros(num_bytes, dtype=torch.uint8)
        """At rank 0: what each rank gives, its own included."""

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """As in `RankKernels`."""
        return torch.float32

    def sum_partials(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype, name: str = "sum") -> Tensor:
        """As in `RankKernels`."""
        host, size = self._own.host, self.share.size
        num_rows, width = x.shape
        assert x.dtype == torch.float32
        y = host.new(f"{name}_{width}", (num_rows, width), dtype)
        if self.share.rank:
            return self._through_rank_0(host, x, y)
        give = kernels.give_rows(host.code, "float32", width)
        self._launch(host, num_rows, give, (x.data_ptr(), self._part(0), 0, width * 4, self._zero))
        self._receive_parts(host, num_rows, [width * 4] * size)
        take = kernels.take_sums(host.code, size, DTYPES[dtype], width, bias is not None)
        waits = self._zero, self._zero, self._zero
        into = y.data_ptr(), 0 if bias is None else bias.data_ptr()
        self._launch(host, num_rows, take, (self._part(0), 0, self._part_bytes, *waits, *into))
        return self._send_to_all(host, y)

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
        host, size = self._own.host, self.share.size
        num_rows = token_ids.shape[0]
        ids = host.new("own ids", (num_rows,), torch.int64)
        own = token_ids.data_ptr(), ids.data_ptr(), first, count
        self._launch(host, num_rows, kernels.own_ids(host.code), own)
        x = table(ids, scale)
        y = host.new("embedded by ranks", tuple(x.shape), x.dtype)
        if self.share.rank:
            return self._through_rank_0(host, x, y)
        row_bytes = x.shape[1] * x.element_size()
        self._receive_parts(host, num_rows, [row_bytes] * size)
        choose = kernels.give_own_rows(host.code, DTYPES[x.dtype], x.shape[1])
        for rank in range(size):
            given = self._part(rank) if rank else x.data_ptr()
            # As many rows of the vocabulary as this rank has, or fewer; the last rank's end at its end.
            chosen = token_ids.data_ptr(), rank * count, count
            self._launch(host, num_rows, choose, (given, y.data_ptr(), 0, row_bytes, self._zero, *chosen))
        return self._send_to_all(host, y)

    def gather_columns(self, x: Tensor, first: int, columns: int) -> Tensor:
        """As in `RankKernels`."""
        host, size = self._own.host, self.share.size
        num_rows = x.shape[0]
        assert x.dtype == torch.float32
        y = host.new("gathered", (num_rows, columns), torch.float32)
        if self.share.rank:
            self._transfer(host, num_rows, _SEND, 0, x.data_ptr(), x.shape[1] * 4)
            return y
        parts = [Share(rank, size).of(columns) for rank in range(size)]
        self._receive_parts(host, num_rows, [len(part) * 4 for part in parts])
        for rank, part in enumerate(parts):
            if not len(part):
                continue
            give = kernels.give_rows(host.code, "float32", len(part))
            given = self._part(rank) if rank else x.data_ptr()
            self._launch(host, num_rows, give, (given, y.data_ptr() + part.start * 4, 0, columns * 4, self._zero))
        return y

    def check(self) -> None:
        """As in `RankKernels`."""
        if self._failure is not None:
            raise RankError(self._failure)

    def fail(self) -> None:
        """As in `RankKernels`."""
        self._fail(f"rank {self.share.rank} failed")

    def reset(self) -> None:
        """As in `RankKernels`."""
        self._links.renew()
        self._failure = None

    # ------------------------------------------------------------------

    @property
    def _zero(self) -> int:
        return int(self._arrived.ctypes.data)

    def _part(self, rank: int) -> int:
        return self._parts.data_ptr() + rank * self._part_bytes

    def _through_rank_0(self, host: Host, x: Tensor, y: Tensor) -> Tensor:
        """Give rank 0 this rank's rows, and get its result."""
        num_rows = x.shape[0]
        self._transfer(host, num_rows, _SEND, 0, x.data_ptr(), x.shape[1] * x.element_size())
        self._transfer(host, num_rows, _RECEIVE, 0, y.data_ptr(), y.shape[1] * y.element_size())
        return y

    def _receive_parts(self, host: Host, num_rows: int, row_bytes: list[int]) -> None:
        for rank in range(1, self.share.size):
            self._transfer(host, num_rows, _RECEIVE, rank, self._part(rank), row_bytes[rank])

    def _send_to_all(self, host: Host, y: Tensor) -> Tensor:
        for rank in range(1, self.share.size):
            self._transfer(host, y.shape[0], _SEND, rank, y.data_ptr(), y.shape[1] * y.element_size())
        return y

    def _transfer(self, host: Host, num_rows: int, what: int, rank: int, address: int, row_bytes: int) -> None:
        arguments = self._callback_at, what, rank, address, row_bytes
        self._launch(host, num_rows, transfer(host.code), arguments, ALL)

    def _run(self, what: int, rank: int, address: int, num_bytes: int) -> None:
        """Send or receive rows, called by a launch; after a failure nothing is, until the next session."""
        if self._failure is not None:
            return
        rows = _memory(address, num_bytes)
        try:
            if what == _SEND:
                self._links.link(rank).send(Frame.PART, rows)
            else:
                self._links.link(rank).receive_part(rows)
        except LinkClosed as error:
            self._fail(f"rank {rank} failed, or its connection did: {error}")
        except BaseException as error:  # nothing may be raised into a launch
            self._fail(f"rank {self.share.rank} failed: {type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        """Exchange nothing more; the first reason counts."""
        self._failure = self._failure or reason
        self._links.close()

    def _launch(self, host: Host, num_rows: int, kernel: str, arguments: tuple[int, ...], share: int = 1) -> None:
        host.launch(KernelLaunch(kernel, "rows", share, 1, arguments), num_rows)


def _memory(address: int, num_bytes: int) -> memoryview:
    if not num_bytes:
        return memoryview(bytearray())
    return np.frombuffer(memoryview((ctypes.c_char * num_bytes).from_address(address)), np.uint8).data
