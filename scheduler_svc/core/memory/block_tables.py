"""Block tables of sequences, and what the sequences of a group share of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.sequences.shared_blocks import SharedBlocks

Table = tuple[list[int], SharedBlocks | None]
"""The block ids of a sequence in one pool, and the first of them, which its group shares."""


def device_tables(sequences: Iterable[Sequence]) -> list[Table]:
    """The device blocks of sequences that are not swapped out."""
    return [(sequence.block_ids, sequence.shared_blocks) for sequence in sequences]


def host_tables(sequences: Iterable[Sequence]) -> list[Table]:
    """The host blocks of swapped-out sequences."""
    return [(sequence.host_block_ids, sequence.shared_blocks) for sequence in sequences]


def clear_tables(sequence: Sequence) -> None:
    """Empty the block tables of a sequence."""
    sequence.block_ids = []
    sequence.host_block_ids = []
    sequence.shared_blocks = None
    sequence.num_cached_blocks, sequence.cache_node = 0, None


def is_shared_by_group(sequence: Sequence, index: int) -> bool:
    """Whether the group shares the block at this index, and another sequence of the group holds it too."""
    shared = sequence.shared_blocks
    return shared is not None and shared.num_holders > 1 and index < len(shared.block_ids)


def have_same_blocks(left: Sequence, right: Sequence, num_blocks: int) -> bool:
    """Whether two sequences have the same first blocks on the device."""
    shared = left.shared_blocks
    if shared is not None and shared is right.shared_blocks and num_blocks <= len(shared.block_ids):
        return True
    return left.block_ids[:num_blocks] == right.block_ids[:num_blocks]


def follow_first_sample(sequence: Sequence, block_size: int) -> None:
    """Take over the cached blocks of its group's first sequence, if they are also its own: nothing is looked up."""
    first = next(iter(sequence.group.sequences), None)
    if first is None or first.cache_node is None or first.num_cached_blocks <= sequence.num_cached_blocks:
        return
    count = first.num_cached_blocks
    if count * block_size <= first.num_prompt_tokens and have_same_blocks(first, sequence, count):
        sequence.num_cached_blocks, sequence.cache_node = count, first.cache_node


def share_table(pool: BlockPool, source: Sequence, child: Sequence, num_blocks: int, block_size: int) -> None:
    """Let a child without blocks hold the first `num_blocks` blocks of `source`.

    The full blocks of the prompt among them are counted once for all that share them: nothing writes to them after the
    fork, so they stay together.
    """
    child.block_ids = table = source.block_ids[:num_blocks]
    num_prompt = min(num_blocks, source.num_prompt_tokens // block_size)
    if source.shared_blocks is None and num_prompt:
        source.shared_blocks = pool.start_sharing(table[:num_prompt])
    shared = source.shared_blocks
    if shared is None or len(shared.block_ids) > num_blocks:
        pool.share_all(table)
    else:
        pool.join(shared)
        pool.share_all(table[len(shared.block_ids) :])
        child.shared_blocks = shared


def stop_sharing(pool: BlockPool, sequence: Sequence, shared: SharedBlocks) -> None:
    """Count a sequence as a holder of its own of all its blocks, like the rest of its group."""
    pool.share_all(shared.block_ids)
    if pool.leave(shared):
        pool.drop(shared.block_ids)
    sequence.shared_blocks = None


def distinct_blocks(tables: Iterable[Table]) -> dict[int, None]:
    """The distinct blocks of these tables, in the order in which they come first."""
    return dict.fromkeys(chain.from_iterable(_counted(tables)))


class MovedTables:
    """New block tables for sequences whose blocks move to another pool; what a group shares, it goes on sharing."""

    def __init__(self, pool: BlockPool, moved_to: dict[int, int]) -> None:
        """moved_to: by block, the new one, taken from the pool. It has one holder, which is the first of its tables."""
        self._pool = pool
        self._moved_to = moved_to
        self._held: set[int] = set()
        self._shared: dict[SharedBlocks, SharedBlocks] = {}
        """By what a group shared before, what it shares now."""

    def hold(self, table: Table) -> Table:
        """Let a sequence hold the blocks that those of its table move to; returns its new table."""
        block_ids, before = table
        if before is None:
            return self._hold(block_ids), None
        shared = self._shared.get(before)
        if shared is None:
            shared = self._shared[before] = self._pool.start_sharing(self._hold(before.block_ids))
        else:
            self._pool.join(shared)
        return shared.block_ids + self._hold(block_ids[len(before.block_ids) :]), shared

    def _hold(self, block_ids: list[int]) -> list[int]:
        moved = list(map(self._moved_to.__getitem__, block_ids))
        if not self._held.isdisjoint(moved):
            self._pool.share_all([block_id for block_id in moved if block_id in self._held])
        self._held.update(moved)
        return moved


def check_table(sequence: Sequence, num_blocks: int) -> None:
    """Check the block tables of a sequence whose KV is in its first `num_blocks` blocks; raises InvariantError."""
    table, host_table = sequence.block_ids, sequence.host_block_ids
    if len(set(table)) != len(table) or len(set(host_table)) != len(host_table):
        raise InvariantError(f"sequence {sequence.sequence_id} holds a block twice")
    if table and host_table:
        raise InvariantError(f"sequence {sequence.sequence_id} is both swapped out and not")
    if num_blocks > len(table or host_table):
        raise InvariantError(f"sequence {sequence.sequence_id} has KV outside of its blocks")
    if sequence.num_cached_blocks > len(table):
        raise InvariantError(f"sequence {sequence.sequence_id} has more cached blocks than blocks")
    shared = sequence.shared_blocks
    if shared is not None and shared.block_ids != (table or host_table)[: len(shared.block_ids)]:
        raise InvariantError(f"sequence {sequence.sequence_id} has other first blocks than it shares")


def shared_of(tables: Iterable[Table]) -> Counter[SharedBlocks]:
    """What groups share of these tables, each with the number of its tables."""
    return Counter(shared for _, shared in tables if shared is not None)


def count_holders(tables: Iterable[Table]) -> Counter[int]:
    """By block, its number of holders in these tables; sequences of a group that share it count as one holder."""
    return Counter(chain.from_iterable(_counted(tables)))


def _counted(tables: Iterable[Table]) -> Iterator[list[int]]:
    """The blocks of each table; blocks that a group shares come with the first table of the group only."""
    seen: set[SharedBlocks] = set()
    for block_ids, shared in tables:
        yield block_ids[len(shared.block_ids) :] if shared is not None and shared in seen else block_ids
        if shared is not None:
            seen.add(shared)
