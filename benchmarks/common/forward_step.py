"""Steps of the CPU's model runner in this process, without services: a loaded model, and batches for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.rows import BenchmarkError
from executor_svc.batch.forward_batch import ForwardBatch
from executor_svc.batch.step_states import StepStates
from executor_svc.config import ExecutorConfig
from executor_svc.cpu.runner import ModelRunner
from executor_svc.device.kv_layout import KVLayout
from executor_svc.models.adapters.places import ModelAdapters
from executor_svc.models.loading import load_model
from executor_svc.plan.description import limits_of
from executor_svc.startup.executors import make_device

_BLOCK_SIZE = 16
_NUM_BLOCKS = 560
_MODEL_LEN = 1024


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A model in this process."""

    runner: ModelRunner
    num_threads: int
    weight_bytes: int
    """Memory of the weights."""
    few_bits: str
    """Formats of the weights in few bits and how each is multiplied; empty for dense weights."""
    adapters: ModelAdapters | None
    layout: KVLayout
    """Of the pool: what `step_batch` needs."""


def make_runner(
    model: Path,
    num_threads: int | None,
    *,
    isa: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> LoadedRunner:
    """The model runner of a checkpoint or GGUF file; all runners have the same keys and values.

    isa: an instruction set below the processor's highest one. more: further options of the executor.

    Raises BenchmarkError if the executor cannot be forced.
    """
    options: dict[str, Any] = {"model": str(model), "device": "cpu", "numerics": "exact", "num_threads": num_threads}
    options |= more or {}
    if isa is not None:
        if "cpu_isa" not in ExecutorConfig.model_fields:
            raise BenchmarkError(f"--isa {isa}: this executor has no option cpu_isa")
        options["cpu_isa"] = isa
    options["disable_hybrid_kv_cache_manager"] = True  # `step_batch` has one table a sequence
    config = ExecutorConfig(**options, num_gpu_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE, max_model_len=_MODEL_LEN)
    device = make_device(config)
    loaded = load_model(config, device)
    pools = device.new_kv_cache(loaded.geometry, config)
    torch.manual_seed(0)
    for layer in pools.layers:
        layer.normal_()
    limits = limits_of(config, loaded.geometry, pools)
    runner = ModelRunner(loaded.model, device, pools, limits, adapters=loaded.adapters)
    sizes = device.num_threads, loaded.geometry.weight_bytes, device.few_bits.summary
    return LoadedRunner(runner, *sizes, loaded.adapters, pools.layout)


def step_batch(chunks: Sequence[tuple[int, int]], layout: KVLayout) -> ForwardBatch:
    """A step of sequences with (cached tokens, new tokens), each in blocks and with a state of its own, with logits of
    each last one; layout: of the runner's pool.

    Raises BenchmarkError for more than the blocks of `make_runner`: kernels would write beyond the pool.
    """
    width = -(-max(context + count for context, count in chunks) // _BLOCK_SIZE)
    if len(chunks) * width > _NUM_BLOCKS:
        raise BenchmarkError(f"{len(chunks)} sequences take {len(chunks) * width} blocks, of {_NUM_BLOCKS}")
    num_tables = layout.num_tables
    tables = torch.arange(len(chunks) * num_tables * width, dtype=torch.int32).view(-1, num_tables, width)
    positions = torch.cat([torch.arange(context, context + count) for context, count in chunks])
    owner = torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor([count for _, count in chunks]))
    ends = torch.tensor([count for _, count in chunks]).cumsum(0)
    slots = tables[owner, :, positions // _BLOCK_SIZE].T.long() * _BLOCK_SIZE + positions % _BLOCK_SIZE
    return ForwardBatch(
        token_ids=300 + (positions * 7 + owner * 131) % 1000,
        positions=positions,
        slot_mapping=slots[0] if num_tables == 1 else slots.contiguous(),
        query_start_loc=torch.cat([torch.zeros(1), ends]).int(),
        seq_lens=torch.tensor([context + count for context, count in chunks], dtype=torch.int32),
        block_tables=tables[:, 0] if num_tables == 1 else tables,
        logits_rows=ends - 1,
        rope_lens=positions + 1,
        states=_states(chunks, _NUM_BLOCKS * num_tables, layout.pages_per_state) if layout.pages_per_state else None,
    )


def _states(chunks: Sequence[tuple[int, int]], first_page: int, num_pages: int) -> StepStates:
    """The states of a step's sequences, none of which is copied; first_page: behind the blocks of all steps, which
    would read what is left of a state as keys and values.
    """
    contexts, counts = (torch.tensor(each, dtype=torch.int32) for each in zip(*chunks, strict=True))
    tables = first_page + torch.arange(len(chunks) * num_pages, dtype=torch.int32).view(-1, num_pages)
    ends = contexts + (counts - 1).clamp(min=0)
    none = torch.zeros(0, dtype=torch.int32)
    starts = torch.zeros(len(chunks) + 1, dtype=torch.int32)
    return StepStates(tables, contexts, contexts, ends, starts, none, none.view(0, num_pages), none.numpy())
