"""Counts of a lane's memory figures, without a walk over the blocks of all running sequences.

Sequences in the decode batch are counted by the batch. Few others remain: sequences that prefill, beams, and
samples before their fork. A shared block counts once. Where all holders of a block have filled it, the pool's count of
holders is enough; a group that shares a block that is not full yet is walked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from scheduler_svc.core.memory.block_manager import BlockManager
from scheduler_svc.core.memory.block_tables import count_holders, device_tables, shared_of
from scheduler_svc.core.queues.queues import RunningQueue
from scheduler_svc.core.sequences.decode_batch import DecodeBatch
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.sequences.shared_blocks import SharedBlocks


def num_stored_tokens(
    blocks: BlockManager, running: RunningQueue, prefilling: RunningQueue, decode_batch: DecodeBatch
) -> int:
    """Number of tokens whose KV the blocks of the running sequences store; shared blocks count once.

    To be called between plans.
    """
    outside = _outside_decode_batch(running, prefilling)
    num_stored = decode_batch.num_computed_tokens + sum(sequence.num_computed_tokens for sequence in outside)
    if not blocks.num_shared_refs:
        return num_stored
    size, ref_counts = blocks.block_size, blocks.pool.ref_counts
    num_stored -= size * blocks.num_shared_refs
    walked = [
        sequence
        for group in running.shared_groups
        if any(map(blocks.shares_unfilled, group.running))
        for sequence in group.running
    ]
    if not walked:
        return num_stored
    tables = device_tables(walked)
    fill = fill_of(walked, size)
    num_stored -= sum(sequence.num_computed_tokens for sequence in walked)
    num_stored += size * sum((each.num_holders - 1) * len(each.block_ids) for each in shared_of(tables))
    for block_id, count in count_holders(tables).items():
        num_others = ref_counts[block_id] - count
        num_stored += size * (ref_counts[block_id] - 1)
        # Another holder has filled the block.
        num_stored += fill.get(block_id, 0) if not num_others else -size * (num_others - 1)
    return num_stored


def num_reserved_blocks(
    blocks: BlockManager, running: RunningQueue, prefilling: RunningQueue, decode_batch: DecodeBatch
) -> int:
    """Number of blocks that running sequences hold beyond those of their tokens."""
    num_blocks = decode_batch.num_reserved_blocks
    num_blocks += sum(map(blocks.num_reserved, _outside_decode_batch(running, prefilling)))
    return num_blocks + sum(len(group.reserved_blocks) for group in running.shared_groups)


def fill_of(sequences: Iterable[Sequence], block_size: int) -> dict[int, int]:
    """By block: the number of tokens whose KV it stores for these sequences."""
    fill, filled = _own_fill(sequences, block_size)
    for shared, num_computed in filled.items():
        _add_fill(fill, shared.block_ids, num_computed, block_size)
    return fill


def num_filled(sequences: Iterable[Sequence], block_size: int) -> int:
    """The sum of `fill_of`."""
    fill, filled = _own_fill(sequences, block_size)
    num_tokens = 0
    for shared, num_computed in filled.items():
        if len(filled) == 1 and fill.keys().isdisjoint(shared.block_ids):
            # One group's blocks: there may be 8,192 blocks, so no Python call for each.
            num_tokens = min(num_computed, len(shared.block_ids) * block_size)
        else:
            _add_fill(fill, shared.block_ids, num_computed, block_size)
    return num_tokens + sum(fill.values())


def _own_fill(sequences: Iterable[Sequence], block_size: int) -> tuple[dict[int, int], dict[SharedBlocks, int]]:
    """`fill_of` without the blocks that groups share; and by these blocks, how many of their tokens are stored."""
    fill: dict[int, int] = {}
    filled: dict[SharedBlocks, int] = {}
    for sequence in sequences:
        num_computed, shared, first = sequence.num_computed_tokens, sequence.shared_blocks, 0
        if shared is not None:
            filled[shared] = max(filled.get(shared, 0), num_computed)
            first = len(shared.block_ids)
            num_computed -= first * block_size
        _add_fill(fill, sequence.block_ids[first:], num_computed, block_size)
    return fill, filled


def _add_fill(fill: dict[int, int], block_ids: list[int], num_tokens: int, block_size: int) -> None:
    """Add blocks, of which the first `num_tokens` tokens are stored, to what `fill_of` returns."""
    for block_id in block_ids[: max(0, -(-num_tokens // block_size))]:
        fill[block_id] = max(fill.get(block_id, 0), min(block_size, num_tokens))
        num_tokens -= block_size


def _outside_decode_batch(running: RunningQueue, prefilling: RunningQueue) -> Collection[Sequence]:
    """The running sequences that are not in the decode batch."""
    outside = dict.fromkeys(prefilling)
    for group in running.shared_groups:
        outside.update((sequence, None) for sequence in group.running if not sequence.is_decoding)
    return outside.keys()
