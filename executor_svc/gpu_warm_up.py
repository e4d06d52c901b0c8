"""What has to happen on a GPU before the first step: the largest one before KV pools are sized, then some of each kind.

A kernel is compiled when it is first launched, which takes a second or more: no request is to wait for that.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.description import limits_of
from executor_svc.device import Device
from executor_svc.kernels.gpu.linear_w8 import TILE_ROWS
from executor_svc.loader import LoadedModel
from executor_svc.plan import AdmittedSequence, Limits, ScheduledTokens, SequenceSampling, StepPlan
from executor_svc.recorded_model import RecordedModel
from executor_svc.worker import Executor

_PROMPT = np.zeros(2, np.int64)
_FIRST = np.zeros(1, np.int64)
"""Slot and block of the steps of each kind."""
_EVERYTHING = SequenceSampling(
    temperature=1.0, top_k=2, top_p=0.5, repetition_penalty=2.0, num_logprobs=1, num_prompt_logprobs=1
)


@torch.inference_mode()
def run_largest_step(loaded: LoadedModel, device: Device, config: ExecutorConfig) -> None:
    """Compute max_num_batched_tokens tokens and max_num_seqs rows of logits, over a cache of one block.

    So all that a step needs is in memory. The kernels keep the memory of results, for the programs that are recorded
    later. Smaller steps come first, for linears that have other kernels for few rows.
    """
    pools = device.new_kv_cache(loaded.geometry, config.model_copy(update={"num_gpu_blocks": 1, "num_cpu_blocks": 0}))
    limits = limits_of(config, loaded.geometry, pools)
    most, most_seqs, where = limits.max_num_batched_tokens, limits.max_num_seqs, device.torch_device
    longest = min(most, limits.max_model_len)
    token_ids, positions = (torch.zeros(most, dtype=torch.int64, device=where) for _ in range(2))
    sampled = torch.zeros(most_seqs, dtype=torch.int64, device=where)
    recorded = RecordedModel(loaded.model, device.kernels, pools, limits, token_ids, positions, sampled)
    for length in (*(rows for rows in TILE_ROWS if rows < longest), longest):
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


def run_steps(executor: Executor) -> None:
    """Run a step of each kind that launches kernels of its own, in the first slot and block; all slots are free again.

    Kernels of samplers and of decodes that are graphs are compiled where these are made. To be called before anybody
    keeps anything in a block.
    """
    for plan in _plans(executor.limits):
        executor.launch(plan, 0).result()
    executor.clear()


def _plans(limits: Limits) -> Iterator[StepPlan]:
    if limits.max_num_batched_tokens < len(_PROMPT) or limits.max_model_len <= len(_PROMPT):
        return
    one = np.ones(1, np.int64)
    # A prompt whose tokens are told, drawn, counted; then a decode, by a graph.
    everything = ScheduledTokens(_FIRST, len(_PROMPT) * one, np.ones(1, np.bool_))
    yield StepPlan(1, 1, admitted=(_sequence(_EVERYTHING),), scheduled=everything)
    yield StepPlan(2, 1, decode_ready=True)
    # One token of a short sequence, in a step without logits: by no graph.
    beginning = ScheduledTokens(_FIRST, one, np.zeros(1, np.bool_))
    yield StepPlan(3, 1, released_slots=_FIRST, admitted=(_sequence(SequenceSampling()),), scheduled=beginning)


def _sequence(sampling: SequenceSampling) -> AdmittedSequence:
    return AdmittedSequence(int(_FIRST[0]), _PROMPT, len(_PROMPT), 0, _FIRST, sampling)
