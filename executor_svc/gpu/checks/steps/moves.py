"""Moves of bytes and whole numbers around a step: copies of pages, tables of adapters' rows, headers of states."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from executor_svc.gpu.checks.steps.history import CheckedStep
from executor_svc.gpu.checks.steps.words import differing, first_of
from executor_svc.gpu.kernels.lora.tables import RowTable, num_tiles, sort_rows, sort_tokens, tile_rows
from executor_svc.gpu.kernels.slots.slots import PROMPT_FAILED, STATE_FAILED
from executor_svc.gpu.kernels.states.plan import GpuStatePlan
from executor_svc.gpu.kernels.states.step import LINE_BYTES
from executor_svc.plan.arrays import IntArray

CopyPages = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, int], None]
COPIED = 3
"""Pages that are copied; a pool has twice as many at least."""
_NO_STATE = -1


def copies_reason(pool: Tensor, copy: CopyPages) -> str | None:
    """Copy pages [pages, bytes] uint8 within a pool of at least 2 COPIED, out of it and into it; its content is lost.

    Returns how what is there then is wrong.
    """
    generator = torch.Generator().manual_seed(0)
    pages = torch.randint(0, 256, (2 * COPIED, pool.shape[1]), generator=generator, dtype=torch.uint8)
    pool[: 2 * COPIED].copy_(pages)
    order = torch.randperm(2 * COPIED, generator=generator)
    read, written = order[:COPIED], order[COPIED:]
    sources, targets = read.to(pool.device), written.to(pool.device)
    copy(pool, pool, sources, targets, COPIED)
    expected = pages.clone()
    expected[written] = pages[read]
    within = differing("pages", pool[: 2 * COPIED], expected)
    staging = torch.zeros_like(pool[:COPIED])
    copy(pool, staging, targets, None, COPIED)
    out = differing("pages out of the pool", staging, pages[read])
    pool[: 2 * COPIED].zero_()
    copy(staging, pool, None, sources, COPIED)
    expected = torch.zeros_like(pages)
    expected[read] = pages[read]
    return first_of([within, out, differing("pages into the pool", pool[: 2 * COPIED], expected)])


def tables_reason(step: CheckedStep, num_places: int) -> str | None:
    """Sort the rows of a built step by the adapters of its slots; return how the tables are wrong."""
    history, sizes, inputs = step.history, step.sizes, step.inputs
    state, buffers = history.slots.state, history.slots.buffers
    of_slots = np.arange(state.num_slots) % (num_places + 1) - 1
    state.adapter_places.copy_(torch.from_numpy(of_slots))
    places = torch.zeros(sizes.num_tokens, dtype=torch.int32, device=history.device)
    tokens, logits = (
        RowTable.empty(count, num_places, history.device) for count in (sizes.num_tokens, sizes.num_logits)
    )
    sort_tokens(buffers, sizes, state.adapter_places, places, tokens)
    sort_rows(places, inputs.logits_rows, logits)
    live = np.isin(step.planned.slots, step.actual.slots)
    expected = np.repeat(np.where(live, of_slots[step.planned.slots], -1), step.counts)
    expected = np.pad(expected, (0, sizes.num_tokens - len(expected)), constant_values=-1)
    return first_of([
        differing("places", places, expected), _table_reason("tokens", tokens, expected),
        _table_reason("logits", logits, expected[inputs.logits_rows.cpu().numpy()]),
    ])  # fmt: skip


def _table_reason(what: str, table: RowTable, places: IntArray) -> str | None:
    order = np.argsort(places, kind="stable")
    order = order[places[order] >= 0]
    size, most = tile_rows(len(places)), num_tiles(len(places), table.max_loras)
    tiles = np.zeros((most, table.tiles.shape[1]), np.int64)
    wanted = []
    for place in np.unique(places[order]).tolist():
        first, count = int(np.sum(places[order] < place)), int(np.sum(places == place))
        wanted += [(place, first + at, min(size, count - at), 0) for at in range(0, count, size)]
    tiles[: len(wanted)] = wanted or tiles[:0]
    return first_of([
        differing(f"rows of {what}", table.rows[: len(order)], order),
        differing(f"tiles of {what}", table.tiles[:most], tiles),
    ])  # fmt: skip


def states_reason(step: CheckedStep) -> str | None:
    """Read and write the headers of the states of a built step's slots; return how they are wrong.

    A slot's state stands elsewhere; whatever that marks is taken back.
    """
    history, sizes, slots = step.history, step.sizes, step.history.slots
    limits, truth = slots.limits, history.truth
    plan = GpuStatePlan(limits.pages_per_state, limits.state_tail, sizes.num_tokens, sizes.num_seqs, history.device)
    plan.read_from(slots.buffers, slots.state, slots.states.tables, slots.states.saves)
    heads = slots.states.tables[:, 0].cpu().numpy()
    live = step.actual.slots
    context, rows = truth.num_computed_tokens[live], step.actual.num_tokens
    stands = np.maximum(context - limits.state_tail, 0)
    wrong = np.zeros(len(live), np.bool_)
    wrong[np.flatnonzero(context > 0)[:1]] = True
    headers = np.full((limits.num_device_blocks, LINE_BYTES // 4), _NO_STATE, np.int32)
    headers[heads[live], 0] = np.where(wrong, context + 1, stands)
    pool = torch.from_numpy(headers.copy()).view(torch.uint8).to(history.device)
    kept = slots.state.numbers.clone()
    plan.begin(sizes.num_seqs, sizes.num_tokens, pool)
    plan.end(pool)
    failed = slots.state.numbers[PROMPT_FAILED.value, : limits.num_slots].clone()
    slots.state.numbers.copy_(kept)
    folded, owners = np.zeros(sizes.num_seqs, np.int64), np.full(sizes.num_tokens, -1)
    index = np.flatnonzero(np.isin(step.planned.slots, live))
    folded[index] = np.where(wrong, context, np.where(context > 0, stands, 0))
    starts = step.counts.cumsum() - step.counts
    for at, count in zip(index.tolist(), rows.tolist(), strict=True):
        owners[starts[at] : starts[at] + count] = at
    marked = np.zeros(limits.num_slots, np.int64)
    marked[live[wrong]] = STATE_FAILED.value
    headers[heads[live], 0] = context + np.maximum(rows - limits.state_tail, 0)
    return first_of([
        differing("folded", plan.step.folded[: sizes.num_seqs], folded),
        differing("owners", plan.step.owners[: sizes.num_tokens], owners), differing("failed slots", failed, marked),
        differing("headers", pool.cpu().view(torch.int32), headers),
    ])  # fmt: skip
