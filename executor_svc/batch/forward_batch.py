"""The flat tensors of one forward pass, built from batch slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_states import StepStates
from executor_svc.plan.arrays import IntArray


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The input of a forward pass: T tokens of S sequences, prefill chunks and decodes mixed, in slot order."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, absolute."""
    slot_mapping: Tensor
    """[T] int64: block_id * block_size + offset, the place of each token's K and V; with several block tables of a
    sequence [tables, T]."""
    query_start_loc: Tensor
    """[S + 1] int32: sequence s owns tokens query_start_loc[s] to query_start_loc[s + 1]."""
    seq_lens: Tensor
    """[S] int32: context length + query length."""
    block_tables: Tensor
    """[S, max_blocks_per_seq] int32, rows padded with any valid block id; with several tables [S, tables,
    max_blocks_per_seq], as in `Slots.tables`."""
    logits_rows: Tensor
    """[L] int64: indices into T of the tokens whose logits the step needs."""
    rope_lens: Tensor
    """[T] int64: max(prompt length, position + 1), the length that length-dependent rotary embeddings use."""
    adapter_places: IntArray | None = None
    """[T]: the place of each token's adapter on the device, -1 for none; None: no token has one."""
    states: StepStates | None = None
    """The recurrent states of the S sequences; None: the model has none."""


def build_batch(
    slots: Slots, scheduled: Scheduled, places: IntArray | None = None, states: StepStates | None = None
) -> ForwardBatch | None:
    """Return the flat tensors of the scheduled tokens, on the CPU; None if there are none.

    places: [num_slots] the place of each slot's adapter, -1 for none; None: no slot has one. states: those of the
    scheduled slots.
    """
    rows, counts = scheduled.slots, scheduled.num_tokens
    if not len(rows):
        return None
    return flat_batch(slots, rows, slots.num_computed_tokens[rows], counts, scheduled.logits_rows, places, states)


def flat_batch(
    slots: Slots,
    rows: IntArray,
    context: IntArray,
    counts: IntArray,
    logits_rows: IntArray,
    places: IntArray | None = None,
    states: StepStates | None = None,
) -> ForwardBatch:
    """Return the flat tensors of the tokens context[s] to context[s] + counts[s] - 1 of the slots rows[s]; [S] each.

    logits_rows: [L], into the T tokens. counts: 1 or more. places, states: as in `build_batch`.
    """
    block_size = slots.limits.block_size
    seq_lens = context + counts
    starts = np.zeros(len(rows) + 1, np.int64)
    counts.cumsum(out=starts[1:])
    owner, positions = rows, context
    if starts[-1] != len(rows):
        # The position of token t of sequence s is context[s] + t - starts[s].
        owner = np.repeat(rows, counts)
        positions = np.arange(starts[-1]) + np.repeat(context - starts[:-1], counts)
    rope_lens = np.maximum(slots.num_prompt_tokens[owner], positions + 1)
    width = -(-int(seq_lens.max()) // block_size)
    # Entries after the end of a block table, and before its window, are 0 or blocks of an earlier sequence or of this
    # one: valid, but without meaning.
    if slots.limits.num_tables == 1:
        blocks, tables = slots.block_tables[owner, positions // block_size], slots.block_tables[rows, :width]
    else:
        blocks, tables = slots.tables[owner, :, positions // block_size].T, slots.tables[rows, :, :width]
    return ForwardBatch(
        token_ids=torch.from_numpy(slots.token_ids[owner, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(blocks.astype(np.int64) * block_size + positions % block_size),
        query_start_loc=torch.from_numpy(starts.astype(np.int32)),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        block_tables=torch.from_numpy(tables),
        logits_rows=torch.from_numpy(logits_rows),
        rope_lens=torch.from_numpy(rope_lens),
        adapter_places=None if places is None else places[owner],
        states=states,
    )
