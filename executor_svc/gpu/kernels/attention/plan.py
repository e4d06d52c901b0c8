"""The GPU's attention plan of a step: filled once per step, shared by all layers of one attention shape."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from executor_svc.device.kernels import AttentionShape, KVScales
from executor_svc.gpu.kernels.attention.attention import attention
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
        self._shape = shape
        self._gluon = gluon
        self._arch = arch
        self._num_sms = num_sms
        self._max_model_len = max_model_len
        width = -(-max_model_len // _SMALLEST_BLOCK)
        self._starts = torch.zeros(max_seqs + 1, dtype=torch.int32, device=device)
        self._lens = torch.zeros(max_seqs, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_seqs, num_tables, padded(width), dtype=torch.int32, device=device)
        self._scratch = self._new_scratch(device)
        ones = torch.ones(shape.num_kv_heads, dtype=torch.float32, device=device)
        self._unscaled = KVScales(ones, ones)
        self._num_seqs = self._max_query_len = self._max_seq_len = 0

    def _new_scratch(self, device: torch.device) -> SegmentScratch:
        shape, num_sms = self._shape, self._num_sms
        if shape.latent is not None:
            return SegmentScratch.of_latents(shape.latent, num_sms, device)
        return SegmentScratch.of(shape.num_heads, shape.num_kv_heads, shape.padded_head_size, num_sms, device)

    def fill(self, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor) -> None:
        """Set the step, from tensors on the host; arguments as in `forward_batch.ForwardBatch`."""
        num_tokens, self._num_seqs = slot_mapping.shape[-1], seq_lens.shape[0]
        tables = block_tables.view(self._num_seqs, -1, block_tables.shape[-1])
        self._max_query_len = int(query_start_loc.diff().max())
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
        self._num_seqs, self.num_tiles = num_seqs, num_tokens
        self._max_query_len, self._max_seq_len = max_query_len, max_seq_len

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
        shape, seqs, scales = self._shape, self._num_seqs, self.scales(kv_layer, given)
        call = AttentionCall(
            q,
            kv_layer,
            self._starts[: seqs + 1],
            self._lens[:seqs],
            self._tables[:seqs, table],
            out,
            shape.scale,
            self._max_query_len,
            self._max_seq_len,
            shape.window,
            shape.softcap,
            None if scales is None else scales.k,
            None if scales is None else scales.v,
            sinks,
            shape.chunk,
            shape.latent,
        )
        self._run(call)

    def _run(self, call: AttentionCall) -> None:
        """Enqueue this call."""
        kind, lengths = call.kind, (self._max_query_len, self._max_seq_len)
        wants_split = default_segments(kind).wants_split
        if wants_split(self._num_seqs, call.num_kv_heads, *lengths, self._num_sms, split_tokens(kind)):
            split_attention(call, self._arch, self._scratch, self._num_sms)
        elif self._gluon and self._max_query_len > 1 and why_not(kind) is None:
            prompt_attention(call)
        else:
            attention(call, self._arch)
