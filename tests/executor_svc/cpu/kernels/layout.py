"""Where the CPU keeps keys within a head's block, and plans for batches. For tests only."""

from __future__ import annotations

from torch import Tensor

from executor_svc.batch.forward_batch import ForwardBatch
from executor_svc.cpu.kernels.attention_plan import CpuAttentionPlan
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.device.kernels import AttentionShape


def as_kept(kv_layer: Tensor) -> Tensor:
    """A cache [N, 2, KVH, B, DP] in the order of its shape, as the CPU has it: keys of a head's block as [DP, B]."""
    kept = kv_layer.clone()
    kept[:, 0] = kv_layer[:, 0].transpose(-1, -2).reshape(kv_layer[:, 0].shape)
    return kept


def as_shaped(kv_layer: Tensor) -> Tensor:
    """The way back."""
    shaped = kv_layer.clone()
    num_blocks, _, heads, block_size, width = kv_layer.shape
    shaped[:, 0] = kv_layer[:, 0].reshape(num_blocks, heads, width, block_size).transpose(-1, -2)
    return shaped


def plan_for(
    kernels: CpuKernels, shape: AttentionShape, batch: ForwardBatch, max_model_len: int | None = None
) -> CpuAttentionPlan:
    """A plan for just this batch, or for sequences of up to max_model_len."""
    plan = kernels.new_attention_plan(shape, max_model_len or int(batch.seq_lens.max()), batch.token_ids.shape[0])
    plan.fill(batch.slot_mapping, batch.query_start_loc, batch.seq_lens, batch.block_tables)
    return plan
