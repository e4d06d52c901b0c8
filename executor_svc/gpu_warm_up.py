"""What has to happen on a GPU before its KV pools are sized: the largest step, so that all it needs is in memory."""

from __future__ import annotations

import torch

from executor_svc.config import ExecutorConfig
from executor_svc.description import limits_of
from executor_svc.device import Device
from executor_svc.loader import LoadedModel
from executor_svc.recorded_model import RecordedModel


@torch.inference_mode()
def run_largest_step(loaded: LoadedModel, device: Device, config: ExecutorConfig) -> None:
    """Compute max_num_batched_tokens tokens and max_num_seqs rows of logits, over a cache of one block.

    The kernels keep the memory of results, for the programs that are recorded later.
    """
    pools = device.new_kv_cache(loaded.geometry, config.model_copy(update={"num_gpu_blocks": 1, "num_cpu_blocks": 0}))
    limits = limits_of(config, loaded.geometry, pools)
    most, most_seqs, where = limits.max_num_batched_tokens, limits.max_num_seqs, device.torch_device
    length = min(most, limits.max_model_len)
    token_ids, positions = (torch.zeros(most, dtype=torch.int64, device=where) for _ in range(2))
    sampled = torch.zeros(most_seqs, dtype=torch.int64, device=where)
    recorded = RecordedModel(loaded.model, device.kernels, pools, limits, token_ids, positions, sampled)
    # All tokens of one sequence, written nowhere, read from the one block.
    width = -(-length // limits.block_size)
    for plan in recorded.plans:
        plan.fill(
            torch.full((length,), -1),
            torch.tensor([0, length], dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32),
            torch.zeros(1, width, dtype=torch.int32),
        )
    recorded.run(length, most_seqs)
    if where.type == "cuda":
        torch.cuda.synchronize(where)
