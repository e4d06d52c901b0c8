"""The CPU's operations: each is a launch, run at once or recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from executor_svc.cpu.kernels import activation, argmax, norm, rows
from executor_svc.cpu.kernels import attention as cpu_attention
from executor_svc.cpu.kernels import rope as rotary
from executor_svc.cpu.kernels.attention_plan import CpuAttentionPlan
from executor_svc.cpu.kernels.codegen.compiled import Code, shared_code
from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.cpu.kernels.codegen.team import KernelLaunch, LaunchProgram, Team
from executor_svc.cpu.kernels.dense_launches import DTYPES, Host, launch_product, row_forms
from executor_svc.cpu.kernels.lora.kernels import CpuAdapterKernels
from executor_svc.cpu.kernels.lora.launches import AdapterLaunches
from executor_svc.cpu.kernels.panel_layout import Coming
from executor_svc.cpu.kernels.panels import PanelWriter, take_panel_rows
from executor_svc.cpu.kernels.quantized import embedding_rows
from executor_svc.cpu.kernels.quantized.launches import PackedWeightPart, Part, PartLaunches
from executor_svc.cpu.kernels.recording import CpuRecording
from executor_svc.cpu.kernels.row_functions import CpuRowFunctions
from executor_svc.cpu.kernels.tensors import addresses as _addresses
from executor_svc.cpu.kernels.tensors import cache_arguments
from executor_svc.cpu.kernels.tensors import dtype_of as _dtype
from executor_svc.cpu.kernels.workspace import Workspace
from executor_svc.device.kernels import (
    AttentionPlan,
    AttentionShape,
    FactorActivation,
    GatedActivation,
    HeadNorms,
    KVScales,
    PlainActivation,
    Rope,
)

_HEAD_MULTIPLE = 16


class CpuKernels(CpuAdapterKernels):
    """Implements `device.adapters.AdapterKernels`; for use by one thread at a time."""

    name = "cpu-5"

    def __init__(self, num_threads: int = 1, isa: Isa | None = None) -> None:
        """isa: what kernels are compiled for; by default that of `host_isa`."""
        self._code = shared_code(isa)
        self._team = Team(self._code, num_threads)
        self.panel_writer = PanelWriter(self._code)
        self._recording: CpuRecording | None = None
        self._times = 1
        """How often a row of the step is there in the rows of launches."""
        self._workspace = Workspace()
        self.matrix_dtype: torch.dtype | None = None
        """Of dense weights of a model that is in another dtype; None: they are in the model's."""

    @property
    def code(self) -> Code:
        return self._code

    @property
    def isa(self) -> Isa:
        return self._code.isa

    @cached_property
    def functions(self) -> CpuRowFunctions:
        """The sampler's functions."""
        return CpuRowFunctions(self._code, self._team)

    @property
    def num_threads(self) -> int:
        return self._team.num_threads

    @contextmanager
    def recording(self) -> Iterator[CpuRecording]:
        """Record launches instead of running them.

        Results are in memory that is kept. The same operation on the same shape, with the same name of its rows, always
        has the same result memory.
        """
        self._recording = CpuRecording(self._team)
        try:
            yield self._recording
        finally:
            self._recording = None

    def padded_head_size(self, head_size: int) -> int:
        """Round up to whole vectors."""
        return -(-head_size // _HEAD_MULTIPLE) * _HEAD_MULTIPLE

    def new_attention_plan(
        self,
        shape: AttentionShape,
        max_model_len: int,
        max_tokens: int,
        max_seqs: int | None = None,
        num_tables: int = 1,
    ) -> CpuAttentionPlan:
        """Return a plan for steps of at most max_tokens tokens."""
        num_threads = self._team.num_threads
        scratch = torch.empty(cpu_attention.scratch_bytes(shape, max_model_len) * num_threads, dtype=torch.uint8)
        return CpuAttentionPlan(shape, max_model_len, max_tokens, num_threads, scratch, num_tables)

    # ------------------------------------------------------------------ operations

    def embed(self, table: Tensor, token_ids: Tensor, scale: float) -> Tensor:
        return self.take_rows(table, token_ids, "embedded", scale)

    def take_rows(
        self,
        table: Tensor,
        ids: Tensor,
        name: str = "taken",
        scale: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """As in `Kernels`, times scale; dtype: of the result, by default the table's."""
        y = self._new(name, (ids.shape[0], table.shape[1]), dtype or table.dtype)
        kernel = rows.take_rows(self._code, (_dtype(table), _dtype(y)), table.shape[1], scale)
        self._launch(KernelLaunch(kernel, "rows", 1, 1, _addresses(table, ids, y)), ids.shape[0])
        return y

    def embed_from_panels(
        self, panels: Tensor, hidden: int, token_ids: Tensor, scale: float, dtype: torch.dtype
    ) -> Tensor:
        """As `embed`, for the panels of a table [vocabulary, hidden]; dtype: of the result."""
        y = self._new("embedded", (token_ids.shape[0], hidden), dtype)
        kernel = take_panel_rows(self._code, (_dtype(panels), _dtype(y)), hidden, scale)
        self._launch(KernelLaunch(kernel, "rows", 1, 1, _addresses(panels, token_ids, y)), token_ids.shape[0])
        return y

    def embed_from_packed(self, part: PackedWeightPart, token_ids: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """As `embed`, for a table [vocabulary, hidden] in few bits, whose numbers are rounded to dtype."""
        hidden = part.layout.columns
        y = self._new("embedded", (token_ids.shape[0], hidden), dtype)
        kernel = embedding_rows.take_rows(self._code, part.layout, _dtype(y), scale)
        self._launch(KernelLaunch(kernel, "rows", 1, 1, _addresses(part.packed, token_ids, y)), token_ids.shape[0])
        return y

    def new_rows(self, name: str, num_rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return self._new(name, (num_rows, columns), dtype)

    def copy_columns(self, source: Tensor, from_column: int, target: Tensor, to_column: int, columns: int) -> Tensor:
        kernel = rows.copy_columns(self._code, _dtype(source), columns, source.shape[1], target.shape[1])
        read, written = _addresses(source, target)
        size = source.element_size()
        arguments = (read + from_column * size, written + to_column * size)
        self._launch(KernelLaunch(kernel, "rows", 1, 1, arguments), source.shape[0])
        return target

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(norm.rms_norm(self._code, _dtype(x), _dtype(weight), x.shape[1], eps), [x], [weight])

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        kernel = norm.add_rms_norm(self._code, _dtype(x), _dtype(weight), x.shape[1], eps, scale)
        return self._norm(kernel, [x, residual], [weight]), residual

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return self._norm(norm.layer_norm(self._code, _dtype(x), x.shape[1], eps), [x], [weight, bias])

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        kernel = norm.add_layer_norm(self._code, _dtype(x), x.shape[1], eps, scale)
        return self._norm(kernel, [x, residual], [weight, bias]), residual

    def _norm(self, kernel: str, rows_of_x: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """Launch a norm of rows, those of the first tensor or of the sum of both."""
        x = rows_of_x[0]
        y = self._new("normed", tuple(x.shape), x.dtype)
        arguments = _addresses(*rows_of_x, y, *weights)
        self._launch(KernelLaunch(kernel, "rows", norm.ROWS_AT_ONCE, 1, arguments), x.shape[0])
        return y

    def add(self, x: Tensor, residual: Tensor, scale: float = 1.0, factor: Tensor | None = None) -> Tensor:
        multiplied = factor is not None
        kernel = norm.add(self._code, _dtype(x), x.shape[1], scale, multiplied)
        arguments = _addresses(x, residual) if factor is None else _addresses(x, residual, factor)
        self._launch(KernelLaunch(kernel, "rows", norm.ROWS_AT_ONCE, 1, arguments), x.shape[0])
        return residual

    def add_normed_groups(
        self, x: Tensor, into: Tensor, weight: Tensor, eps: float, before: float, after: float
    ) -> Tensor:
        groups = x.shape[1] // len(weight), len(weight)
        kernel = norm.add_normed_groups(self._code, _dtype(x), _dtype(weight), groups, eps, before, after)
        arguments = _addresses(x, into, weight)
        self._launch(KernelLaunch(kernel, "rows", norm.ROWS_AT_ONCE, 1, arguments), x.shape[0])
        return into

    def norm_heads(self, qkv: Tensor, norms: HeadNorms, shape: AttentionShape) -> Tensor:
        """Normalize the heads of qkv [T, (H + 2 KVH) * DP], of any stride between rows, in place; values stay."""
        behind = qkv.stride(0) // shape.padded_head_size - shape.num_heads - shape.num_kv_heads
        heads = (shape.num_heads, shape.num_kv_heads, behind)
        sizes = (shape.head_size, shape.padded_head_size)
        build = norm.norm_all_heads if norms.kind == "all heads" else norm.norm_heads
        kernel = build(self._code, _dtype(qkv), _dtype(norms.q), heads, *sizes, norms.eps)
        arguments = qkv.data_ptr(), *_addresses(norms.q, norms.k)
        self._launch(KernelLaunch(kernel, "rows", norm.ROWS_AT_ONCE, 1, arguments), qkv.shape[0])
        return qkv

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
        assert isinstance(plan, CpuAttentionPlan)
        assert scales is None, "there is no cache in fp8 here"
        parts = (qkv.shape[1] // shape.padded_head_size - shape.num_heads) // shape.num_kv_heads
        fused = norms if norms is not None and rotary.in_one_pass(norms, parts) else None
        if norms is not None and fused is None:
            qkv = self.norm_heads(qkv, norms, shape)
        scale_dtype = None if rope.query_scales is None else _dtype(rope.query_scales)
        rotation = rotary.Rotation(
            rope.cos.shape[1], _dtype(rope.cos), scale_dtype, kv_parts=parts, kv_dtype=_dtype(kv_layer)
        )
        rotation = replace(rotation, heads_between=(qkv.stride(0) - qkv.shape[1]) // shape.padded_head_size)
        if fused is not None:
            rotation = replace(
                rotation,
                norm_dtype=_dtype(fused.q),
                norm_eps=fused.eps,
                norms_after=fused.kind == "heads after rope",
                values_normed=fused.v is not None,
            )
        kernel = rotary.rope_write_kv(self._code, _dtype(qkv), shape, rotation, kv_layer.shape[3])
        arguments = (
            qkv.data_ptr(),
            *_addresses(rope.cos, rope.sin, rope.rows),
            plan.slots_of[table].ctypes.data,
            *cache_arguments(kv_layer),
        )
        arguments += (0,) if rope.query_scales is None else _addresses(rope.query_scales)
        arguments += (0, 0) if fused is None else _addresses(fused.q, fused.k)
        arguments += (0,) if fused is None or fused.v is None else _addresses(fused.v)
        self._launch(KernelLaunch(kernel, "rows", rotary.ROWS_AT_ONCE, 1, arguments), qkv.shape[0])
        return qkv.view(qkv.shape[0], -1, shape.padded_head_size)[:, : shape.num_heads]

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
        assert isinstance(plan, CpuAttentionPlan)
        assert scales is None, "there is no cache in fp8 here"
        out = self._new("attended", (q.shape[0], shape.num_heads * shape.padded_head_size), q.dtype)
        block_size = kv_layer.shape[3]
        length, with_sinks = plan.max_model_len, sinks is not None
        dtypes = _dtype(q), _dtype(kv_layer)
        kernel = cpu_attention.attention(self._code, dtypes, shape, block_size, length, with_sinks)
        stride = q.stride(0) * q.element_size()
        sink = 0 if sinks is None else _addresses(sinks)[0]
        where = (*cache_arguments(kv_layer), out.data_ptr(), plan.table[table].ctypes.data)
        arguments = (q.data_ptr(), stride, *where, sink)
        self._launch(KernelLaunch(kernel, plan.name, 1, 1, arguments), plan.num_tiles)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated("silu", gate_up)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated("gelu_tanh", gate_up)

    def activate_times(self, x: Tensor, factors: Tensor, from_column: int, name: FactorActivation) -> Tensor:
        y = self._new("activated", tuple(x.shape), x.dtype)
        kernel = activation.activate_times(self._code, name, _dtype(x), x.shape[1], (x.stride(0), factors.shape[1]))
        first = factors.data_ptr() + from_column * factors.element_size()
        arguments = (x.data_ptr(), first, y.data_ptr())
        self._launch(KernelLaunch(kernel, "rows", activation.ROWS_AT_ONCE, 1, arguments), x.shape[0])
        return y

    def activate(self, x: Tensor, name: PlainActivation, scalars: Tensor | None = None) -> Tensor:
        y = self._new("activated", tuple(x.shape), x.dtype)
        kernel = activation.plain(self._code, name, _dtype(x), x.shape[1])
        arguments = (*_addresses(x, y), 0 if scalars is None else scalars.data_ptr())
        self._launch(KernelLaunch(kernel, "rows", activation.ROWS_AT_ONCE, 1, arguments), x.shape[0])
        return y

    def _gated(self, name: GatedActivation, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[1] // 2
        y = self._new("activated", (gate_up.shape[0], width), gate_up.dtype)
        kernel = activation.gated(self._code, name, _dtype(gate_up), width)
        self._launch(KernelLaunch(kernel, "rows", activation.ROWS_AT_ONCE, 1, _addresses(gate_up, y)), gate_up.shape[0])
        return y

    def linear(
        self, x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int, out_dtype: torch.dtype
    ) -> Tensor:
        """Return x @ weight.T + bias for a weight in panels (`panels.new_panels`)."""
        y = self._new(f"linear_{out_features}", (x.shape[0], out_features), out_dtype)
        launch_product(self.host, row_forms(self.host, x, panels.dtype), panels, bias, y)
        return y

    def stored_linear(
        self,
        x: Tensor,
        parts: Sequence[Part],
        bias: Tensor | None,
        out_features: int,
        out_dtype: torch.dtype,
        activation: GatedActivation | None = None,
    ) -> Tensor:
        """Return x @ weight.T + bias for a weight in parts, one below the other; activation: as of `PartLaunches`."""
        assert x.is_contiguous()
        y = self._new(f"linear_{out_features}", (x.shape[0], out_features), out_dtype)
        PartLaunches(self.host, x, bias, y, activation).run(parts)
        return y

    @property
    def host(self) -> Host:
        """What launches of other modules need."""
        how = self._new, self._launch, self._launch_product, self._scratch
        return Host(self._code, self._team.num_threads, *how)

    def _scratch(self, num_bytes: int) -> Tensor:
        """Return memory of so many bytes for each thread; the same for the same number of bytes."""
        return self._workspace.take("scratch", (self._team.num_threads, num_bytes), torch.uint8)

    @property
    def _adapters(self) -> AdapterLaunches:
        return AdapterLaunches(self._code, self._workspace, self._launch, self._scratch)

    def scale_rows(self, x: Tensor, scale: float) -> Tensor:
        kernel = rows.scale_rows(self._code, _dtype(x), x.shape[1], scale)
        self._launch(KernelLaunch(kernel, "rows", 1, 1, _addresses(x)), x.shape[0])
        return x

    # ------------------------------------------------------------------ logits

    def argmax(self, logits: Tensor) -> Tensor:
        count, vocab_size = logits.shape
        ids = self._new("best", (count,), torch.int64)
        if vocab_size < argmax.LEAST_IN_PARTS:
            kernel = argmax.argmax(self._code, vocab_size)
            self._launch(KernelLaunch(kernel, "rows", 1, 1, _addresses(logits, ids)), count)
            return ids
        found = self._new("best of parts", (count, 3, argmax.PARTS), torch.float32)
        look, choose = argmax.argmax_of_parts(self._code, vocab_size)
        self._launch(KernelLaunch(look, "rows", 1, argmax.PARTS, _addresses(logits, found)), count)
        self._launch(KernelLaunch(choose, "rows", 1, 1, _addresses(found, ids)), count)
        return ids

    def finish_logits(self, logits: Tensor, dtype: torch.dtype, divisor: float, cap: float | None) -> Tensor:
        if divisor != 1.0 or cap is not None:
            width = logits.shape[1]
            kernel = activation.finish_logits(self._code, DTYPES[dtype], width, divisor, cap)
            self._launch(KernelLaunch(kernel, "rows", 1, 1, _addresses(logits)), logits.shape[0])
        return logits

    # ------------------------------------------------------------------

    def _new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._recording is None:
            return torch.empty(shape, dtype=dtype)
        return self._workspace.take(f"{self._recording.rows} {name}", shape, dtype)

    def _launch(self, launch: KernelLaunch, count: int) -> None:
        if self._recording is None:
            LaunchProgram(self._team, [launch]).run(**{launch.count: count})
        else:
            self._team.check(launch)
            if launch.count == "rows":
                launch = replace(launch, count=self._recording.rows, times=self._times)
            self._recording.launches.append(launch)

    def _launch_product(self, launch: KernelLaunch, count: int, coming: Coming) -> None:
        """Launch a product, whose last arguments are of its own weight until another one follows."""
        if self._recording is not None:
            self._recording.announce(coming)
        self._launch(replace(launch, arguments=(*launch.arguments, *coming)), count)
