"""The GPU's operations: each runs at once, or is recorded for later runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from executor_svc.device.adapters import AdapterPlaces, AdapterRows, EmbeddingPlaces
from executor_svc.device.kernels import (
    AttentionPlan,
    AttentionShape,
    FactorActivation,
    HeadNorms,
    KVScales,
    PlainActivation,
    Rope,
)
from executor_svc.errors import StartError
from executor_svc.gpu.kernels import activation, norm, rows
from executor_svc.gpu.kernels.attention.config import HEAD_SIZES
from executor_svc.gpu.kernels.attention.gluon.backend import PromptBackend
from executor_svc.gpu.kernels.attention.plan import GpuAttentionPlan
from executor_svc.gpu.kernels.exact.attention_plan import ExactAttentionPlan
from executor_svc.gpu.kernels.exact.attention_probe import ExactAttention
from executor_svc.gpu.kernels.few_bits.embedding import embed_few_bits
from executor_svc.gpu.kernels.few_bits.layout import FewBitsWeight
from executor_svc.gpu.kernels.lora.adapter_places import GpuAdapterPlaces, GpuEmbeddingPlaces
from executor_svc.gpu.kernels.lora.tables import MAX_PLACES, GpuAdapterRows
from executor_svc.gpu.kernels.rope import rope_write_kv
from executor_svc.gpu.kernels.sampling import logits
from executor_svc.gpu.kernels.step_ways import StepWays
from executor_svc.gpu.launches.noting import begin_operation

Operation = Callable[[int], None]
"""Enqueues an operation on the first n rows of its tensors; argument: n."""


class LinearInto(Protocol):
    """A linear layer that can write to a given tensor."""

    out_features: int

    def __call__(self, x: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor: ...


class GpuProgram:
    """Recorded operations; implements `device.kernels.Program`."""

    def __init__(self, operations: Sequence[tuple[str, Operation]]) -> None:
        self._operations = tuple(operations)

    def run(self, **counts: int) -> None:
        """Enqueue all operations, in order; counts: number of rows by name, 0 skips. Does not wait."""
        for name, operation in self._operations:
            if counts[name]:
                begin_operation()
                operation(counts[name])


class GpuRecording:
    """Implements `device.kernels.Recording`."""

    def __init__(self) -> None:
        self.rows = "rows"
        self.operations: list[tuple[str, Operation]] = []

    def program(self) -> GpuProgram:
        return GpuProgram(self.operations)


class GpuKernels:
    """Implements `device.adapters.AdapterKernels`, for one stream and for use by one thread at a time.

    Recorded results have kept memory: the same for the same name, shape and dtype. Adapters have the memory of their
    places from the start, and are packed by any thread.
    """

    name = "gpu-2"

    def __init__(self, device: torch.device, arch: int, num_sms: int, exact: ExactAttention | None = None) -> None:
        """arch: compute capability of the device, such as 90; num_sms: its number of multiprocessors.

        exact: of exact mode, in which a row's bits do not depend on the others.
        """
        self._device = device
        self.exact = exact
        if exact is not None:
            self.name = f"{self.name} exact-1"
        self._gluon: PromptBackend | None = None
        self._arch = arch
        self._num_sms = num_sms
        self.tiles_of: Callable[[AttentionShape], int] = lambda _: arch
        """Says the compute capability whose tiles attention of a shape has; other than the device's, if need be."""
        self.step_ways = StepWays()
        """Of what steps do around a model."""
        self._recording: GpuRecording | None = None
        self._buffers: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}
        self._num_places = 0

    @property
    def arch(self) -> int:
        """The compute capability of the device, such as 90."""
        return self._arch

    def attend_prompts_by(self, gluon: PromptBackend) -> None:
        """Let the Gluon kernel attend for the prompts of plans that are made from now on."""
        self._gluon = gluon
        self.name = f"{self.name} gluon-1"

    @contextmanager
    def recording(self) -> Iterator[GpuRecording]:
        self._recording = GpuRecording()
        try:
            yield self._recording
        finally:
            self._recording = None

    @property
    def current_recording(self) -> GpuRecording | None:
        """The recording in progress; None: operations run at once."""
        return self._recording

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Forget, at the end, the memory of results that were recorded inside."""
        before = dict(self._buffers)
        try:
            yield
        finally:
            self._buffers = before

    def padded_head_size(self, head_size: int) -> int:
        """Round up to a head size of the attention kernels; raises StartError above the largest."""
        for size in HEAD_SIZES:
            if head_size <= size:
                return size
        raise StartError(f"--device cuda: heads of {head_size} numbers, at most {HEAD_SIZES[-1]} are possible on a GPU")

    def new_attention_plan(
        self,
        shape: AttentionShape,
        max_model_len: int,
        max_tokens: int,
        max_seqs: int | None = None,
        num_tables: int = 1,
    ) -> GpuAttentionPlan:
        sizes = max_model_len, max_tokens, max_tokens if max_seqs is None else max_seqs
        where = self._device, self.tiles_of(shape), self._num_sms
        if self.exact is None:
            gluon = self._gluon is not None and self._gluon.serves(shape)
            return GpuAttentionPlan(shape, *sizes, *where, num_tables, gluon=gluon)
        return ExactAttentionPlan(shape, *sizes, *where, num_tables, wide=self.exact.may_be_wide(shape))

    # ------------------------------------------------------------------ operations

    def embed(self, table: Tensor, token_ids: Tensor, scale: float) -> Tensor:
        y = self.new("embedded", (token_ids.shape[0], table.shape[1]), table.dtype)
        return self.run(y, lambda n: rows.embed(table, token_ids[:n], scale, y[:n]))

    def embed_few_bits(self, table: FewBitsWeight, token_ids: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """Return rows of a table in few bits times scale, [T, hidden] in this dtype, for token_ids [T] int64."""
        y = self.new("embedded", (token_ids.shape[0], table.columns), dtype)
        return self.run(y, lambda n: embed_few_bits(table, token_ids[:n], scale, y[:n]))

    def take_rows(self, table: Tensor, ids: Tensor, name: str = "taken") -> Tensor:
        y = self.new(name, (ids.shape[0], table.shape[1]), table.dtype)
        return self.run(y, lambda n: rows.take_rows(table, ids[:n], y[:n]))

    def new_rows(self, name: str, num_rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return self.new(name, (num_rows, columns), dtype)

    def copy_columns(self, source: Tensor, from_column: int, target: Tensor, to_column: int, columns: int) -> Tensor:
        read = source[:, from_column : from_column + columns]
        written = target[:, to_column : to_column + columns]
        return self.run(target, lambda n: rows.copy_columns(read[:n], written[:n]))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = self.new("normed", tuple(x.shape), x.dtype)
        return self.run(y, lambda n: norm.rms_norm(x[:n], weight, eps, y[:n]))

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        y = self.new("normed", tuple(x.shape), x.dtype)
        return self.run(y, lambda n: norm.add_rms_norm(x[:n], residual[:n], weight, eps, scale, y[:n])), residual

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y = self.new("normed", tuple(x.shape), x.dtype)
        return self.run(y, lambda n: norm.layer_norm(x[:n], weight, bias, eps, y[:n]))

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        y = self.new("normed", tuple(x.shape), x.dtype)
        self.run(y, lambda n: norm.add_layer_norm(x[:n], residual[:n], weight, bias, eps, scale, y[:n]))
        return y, residual

    def add(self, x: Tensor, residual: Tensor, scale: float = 1.0, factor: Tensor | None = None) -> Tensor:
        return self.run(residual, lambda n: norm.add(x[:n], residual[:n], scale, factor))

    def add_normed_groups(
        self, x: Tensor, into: Tensor, weight: Tensor, eps: float, before: float, after: float
    ) -> Tensor:
        return self.run(into, lambda n: norm.add_normed_groups(x[:n], into[:n], weight, eps, before, after))

    def rope_write_kv(
        self,
        qkv: Tensor,
        rope: Rope,
        kv_layer: Tensor,
        shape: AttentionShape,
        plan: AttentionPlan,
        norms: HeadNorms | None = None,
        scales: KVScales | None = None,
        table: int = 0,
    ) -> Tensor:
        assert isinstance(plan, GpuAttentionPlan)
        heads, used = shape.num_heads, plan.scales(kv_layer, scales)

        if norms is not None and norms.kind == "all heads":
            sizes, all_heads = (heads, shape.num_kv_heads, shape.head_size), norms
            self.run(qkv, lambda n: norm.norm_all_heads(qkv[:n], all_heads, *sizes))
            norms = None

        def run(n: int) -> None:
            rope_write_kv(
                qkv[:n],
                rope.cos,
                rope.sin,
                rope.rows[:n],
                kv_layer,
                plan.slot_mappings[table, :n],
                heads,
                norms,
                used,
                query_scales=rope.query_scales,
            )

        self.run(qkv, run)
        return qkv.view(qkv.shape[0], -1, shape.padded_head_size)[:, :heads]

    def attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        shape: AttentionShape,
        plan: AttentionPlan,
        scales: KVScales | None = None,
        sinks: Tensor | None = None,
        table: int = 0,
    ) -> Tensor:
        assert isinstance(plan, GpuAttentionPlan)
        out = self.new("attended", (q.shape[0], shape.num_heads * shape.padded_head_size), q.dtype)
        return self.run(out, lambda n: plan.attend(q[:n], kv_layer, out[:n], scales, sinks, table))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        y = self.new("activated", (gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
        return self.run(y, lambda n: activation.silu_mul(gate_up[:n], y[:n]))

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        y = self.new("activated", (gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
        return self.run(y, lambda n: activation.gelu_tanh_mul(gate_up[:n], y[:n]))

    def activate(self, x: Tensor, name: PlainActivation, scalars: Tensor | None = None) -> Tensor:
        y = self.new("activated", tuple(x.shape), x.dtype)
        return self.run(y, lambda n: activation.activate(x[:n], name, scalars, y[:n]))

    def activate_times(self, x: Tensor, factors: Tensor, from_column: int, name: FactorActivation) -> Tensor:
        y = self.new("activated", tuple(x.shape), x.dtype)
        chosen = factors[:, from_column : from_column + x.shape[1]]
        return self.run(y, lambda n: activation.activate_times(x[:n], chosen[:n], name, y[:n]))

    def linear(self, x: Tensor, linear: LinearInto, out_dtype: torch.dtype) -> Tensor:
        """Return linear(x) as out_dtype."""
        y = self.new(f"linear {linear.out_features}", (x.shape[0], linear.out_features), out_dtype)
        return self.run(y, lambda n: _into(linear(x[:n], y[:n], out_dtype)))

    def argmax(self, scores: Tensor) -> Tensor:
        num_rows, vocab = scores.shape
        ids = self.new("best", (num_rows,), torch.int64)
        scratch = self.new("argmax scratch", (logits.argmax_scratch(num_rows, vocab),), torch.int32)
        return self.run(ids, lambda n: logits.argmax(scores[:n], scratch, ids[:n]))

    def finish_logits(self, scores: Tensor, dtype: torch.dtype, divisor: float, cap: float | None) -> Tensor:
        if divisor == 1.0 and cap is None:
            return scores
        return self.run(scores, lambda n: activation.finish_logits(scores[:n], dtype, divisor, cap))

    # ------------------------------------------------------------------ adapters

    def new_adapter_memory(self, num_bytes: int) -> Tensor:
        """Return pinned memory: steps read a part of it, and copies of the rest do not wait.

        Raises ValueError if the system can pin no more memory.
        """
        try:
            return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        except RuntimeError as error:
            raise ValueError(f"{num_bytes} bytes of pinned memory of the host: {error}") from error

    def new_adapter_rows(self, max_rows: int) -> GpuAdapterRows:
        """As in `AdapterKernels`, for the number of places of those that were made before."""
        return GpuAdapterRows(max_rows, self._num_places, self._device)

    def new_adapter_places(
        self,
        num_places: int,
        max_rank: int,
        in_features: int,
        part_columns: Sequence[int],
        dtype: torch.dtype,
        replaces_rows: bool = False,
    ) -> GpuAdapterPlaces:
        """As in `AdapterKernels`; raises StartError, naming the option, for too many places."""
        self._set_num_places(num_places)
        return GpuAdapterPlaces(num_places, max_rank, in_features, part_columns, dtype, self._device, replaces_rows)

    def new_embedding_places(
        self, num_places: int, max_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> GpuEmbeddingPlaces:
        """As in `AdapterKernels`; raises StartError, naming the option, for too many places."""
        self._set_num_places(num_places)
        return GpuEmbeddingPlaces(num_places, max_rank, hidden_size, dtype, self._device)

    def add_adapters(self, x: Tensor, y: Tensor, places: AdapterPlaces, rows: AdapterRows) -> Tensor:
        assert isinstance(places, GpuAdapterPlaces)
        assert isinstance(rows, GpuAdapterRows)
        sums, table = self.new("adapter sums", (places.workspace_size(len(x)),), torch.float32), rows.table
        return self.run(y, lambda n: places.add(x[:n], table, sums, y[:n]))

    def add_embedding_adapters(
        self, token_ids: Tensor, y: Tensor, places: EmbeddingPlaces, rows: AdapterRows
    ) -> Tensor:
        assert isinstance(places, GpuEmbeddingPlaces)
        assert isinstance(rows, GpuAdapterRows)
        sums, table = self.new("adapter sums", (places.workspace_size(len(y)),), torch.float32), rows.table
        return self.run(y, lambda n: places.add(token_ids[:n], table, sums, y[:n]))

    def scale_rows(self, x: Tensor, scale: float) -> Tensor:
        return self.run(x, lambda n: rows.scale_rows(x[:n], scale))

    def _set_num_places(self, num_places: int) -> None:
        if num_places > MAX_PLACES:
            raise StartError(f"--max-loras {num_places}: at most {MAX_PLACES} are possible on a GPU")
        self._num_places = num_places

    # ------------------------------------------------------------------

    def new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory for a result; while operations are recorded it is kept, the same for the same arguments."""
        if self._recording is None:
            return torch.empty(shape, dtype=dtype, device=self._device)
        key = f"{self._recording.rows} {name}", shape, dtype
        if key not in self._buffers:
            # Zeros: rows that pad a step are never written, and must be finite.
            self._buffers[key] = torch.zeros(shape, dtype=dtype, device=self._device)
        return self._buffers[key]

    def run(self, result: Tensor, operation: Operation) -> Tensor:
        """Run an operation on all rows of its result, or record it."""
        if self._recording is None:
            operation(result.shape[0])
        else:
            self._recording.operations.append((self._recording.rows, operation))
        return result


def _into(_: Tensor) -> None:
    """Ignore the result of a kernel that writes to a given tensor."""
