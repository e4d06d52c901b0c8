"""The GPU's attention plan of a step: filled once per step, shared by all layers of one attention shape."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from executor_svc.device.kernels import AttentionShape, KVScales
from executor_svc.gpu.kernels.attention.attention import attention
from executor_svc.gpu.kernels.attention.by_torch import BY_TORCH, attention_by_torch
from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.gluon.prefill import prompt_attention
from executor_svc.gpu.kernels.attention.gluon.tiles import why_not
from executor_svc.gpu.kernels.attention.segments import SegmentScratch, default_segments
from executor_svc.gpu.kernels.attention.split import split_attention, split_tokens
from executor_svc.gpu.kernels.slots.slots import StepBuffers, padded

_SMALLEST_BLOCK = 8
_names = itertools.count()


class GpuAttentionPlan:
    """The sequences of a step, at fixed addresses for recorded launches and captured graphs."""

    def __init__(
        self,
        shape: AttentionShape,
        max_model_len: int,
        max_tokens: int,
        max_seqs: int,
        device: torch.device,
        arch: int,
        num_sms: int,
        num_tables: int = 1,
        *,
        gluon: bool = False,
    ) -> None:
        """Allocate memory for steps of up to max_tokens tokens and max_seqs sequences, with so many block tables.

        gluon: whether the Gluon kernel attends for prompts.
        """
        self.name = f"tokens{next(_names)}"
        self.num_tiles = 0
        self.slot_mappings = torch.full((num_tables, padded(max_tokens)), -1, dtype=torch.int64, device=device)
        """[num_tables, at least max_tokens]: where the step's tokens are written, by block table."""
        self.shape = shape
        self._gluon = gluon
        self.arch, self.num_sms = arch, num_sms
        self._max_model_len = max_model_len
        width = -(-max_model_len // _SMALLEST_BLOCK)
        self._starts = torch.zeros(max_seqs + 1, dtype=torch.int32, device=device)
        self._lens = torch.zeros(max_seqs, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_seqs, num_tables, padded(width), dtype=torch.int32, device=device)
        self.scratch = self._new_scratch(device)
        ones = torch.ones(shape.num_kv_heads, dtype=torch.float32, device=device)
        self._unscaled = KVScales(ones, ones)
        self.num_seqs = self.max_query_len = self._max_seq_len = 0

    def _new_scratch(self, device: torch.device) -> SegmentScratch:
        shape, num_sms = self.shape, self.num_sms
        if shape.latent is not None:
            return SegmentScratch.of_latents(shape.latent, num_sms, device)
        return SegmentScratch.of(shape.num_heads, shape.num_kv_heads, shape.padded_head_size, num_sms, device)

    def fill(self, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor) -> None:
        """Set the step, from tensors on the host; arguments as in `forward_batch.ForwardBatch`."""
        num_tokens, self.num_seqs = slot_mapping.shape[-1], seq_lens.shape[0]
        tables = block_tables.view(self.num_seqs, -1, block_tables.shape[-1])
        self.max_query_len = int(query_start_loc.diff().max())
        self._max_seq_len = int(seq_lens.max())
        self.num_tiles = num_tokens
        for into, given in (
            (self.slot_mappings[:, :num_tokens], slot_mapping.view(-1, num_tokens)),
            (self._starts, query_start_loc),
            (self._lens, seq_lens),
            (self._tables[..., : tables.shape[2]], tables),
        ):
            into[: given.shape[0]].copy_(given, non_blocking=True)

    def read_from(self, buffers: StepBuffers) -> None:
        """Read steps from tensors built on the device, in place of `fill`; must precede any recording."""
        inputs = buffers.inputs(buffers.most)
        self.slot_mappings, self._tables = buffers.slot_mappings, buffers.tables
        self._starts, self._lens = inputs.query_start_loc, inputs.seq_lens

    def set_sizes(self, num_seqs: int, num_tokens: int, max_query_len: int, max_seq_len: int) -> None:
        """Set the sizes of the step for launches; for a capture, those of the longest step of the graph."""
        self.num_seqs, self.num_tiles = num_seqs, num_tokens
        self.max_query_len, self._max_seq_len = max_query_len, max_seq_len

    def step(self, table: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the step's query_start_loc, seq_lens and one of its block tables, on the device."""
        seqs = self.num_seqs
        return self._starts[: seqs + 1], self._lens[:seqs], self._tables[:seqs, table]

    def scales(self, kv_layer: Tensor, given: KVScales | None = None) -> KVScales | None:
        """Return the scales of keys and values: the given ones, or 1 for a cache in fp8 without scales."""
        unscaled = kv_layer.dtype == torch.float8_e4m3fn and given is None
        return self._unscaled if unscaled else given

    def attend(
        self,
        q: Tensor,
        kv_layer: Tensor,
        out: Tensor,
        given: KVScales | None = None,
        sinks: Tensor | None = None,
        table: int = 0,
    ) -> None:
        """Enqueue attention of q [T, H, D] over the sequences of the step, by one of their tables; out: [T, H * D]."""
        self._run(self.call(q, kv_layer, out, given, sinks, table))

    def call(
        self,
        q: Tensor,
        kv_layer: Tensor,
        out: Tensor,
        given: KVScales | None = None,
        sinks: Tensor | None = None,
        table: int = 0,
    ) -> AttentionCall:
        """Return the arguments of attention over the sequences of the step, as `attend` takes them."""
        shape, scales = self.shape, self.scales(kv_layer, given)
        return AttentionCall(
            q,
            kv_layer,
            *self.step(table),
            out,
            shape.scale,
            self.max_query_len,
            self._max_seq_len,
            shape.window,
            shape.softcap,
            None if scales is None else scales.k,
            None if scales is None else scales.v,
            sinks,
            shape.chunk,
            shape.latent,
        )

    def _run(self, call: AttentionCall) -> None:
        """Enqueue this call."""
        if self.arch == BY_TORCH:
            attention_by_torch(call)
            return
        kind, lengths = call.kind, (self.max_query_len, self._max_seq_len)
        wants_split = default_segments(kind).wants_split
        if wants_split(self.num_seqs, call.num_kv_heads, *lengths, self.num_sms, split_tokens(kind)):
            split_attention(call, self.arch, self.scratch, self.num_sms)
        elif self._gluon and self.max_query_len > 1 and why_not(kind) is None:
            prompt_attention(call)
        else:
            attention(call, self.arch)
