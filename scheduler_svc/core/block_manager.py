"""Block tables of sequences over the device pool.

Blocks are freed at once when a sequence ends or is preempted: plans run in the order in which they are sent, so a later
plan that uses a block again comes after every plan that could still touch it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.sequence import Sequence


class BlockManager:
    """Gives blocks to sequences and takes them back. Sizes are in tokens unless they say blocks."""

    def __init__(self, num_blocks: int, block_size: int, watermark: float) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._num_watermark_blocks = int(watermark * num_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def can_admit(self, num_tokens: int, *, alone: bool, num_more: int = 0) -> bool:
        """Do blocks for a newcomer's tokens leave the watermark free? Alone it may go below.

        With `num_more`: would they, with so many more blocks free.
        """
        reserve = 0 if alone else self._num_watermark_blocks
        return self.num_blocks_for(num_tokens) + reserve <= self.pool.num_free + num_more

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence without blocks what its first `num_tokens` tokens need."""
        if sequence.block_ids:
            raise InvariantError(f"sequence {sequence.sequence_id} has blocks already")
        sequence.block_ids = self.pool.take(self.num_blocks_for(num_tokens))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self.pool.num_free

    def take(self, count: int) -> list[int]:
        """Free blocks, to be appended to block tables; raises InvariantError if there are not as many."""
        return self.pool.take(count)

    def num_reserved(self, sequence: Sequence) -> int:
        """Blocks that it holds beyond those of its tokens, those that are computed and those that are known."""
        present = max(sequence.num_computed_tokens, len(sequence.token_ids))
        return max(0, len(sequence.block_ids) - self.num_blocks_for(present))

    def free(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence back; safe to call twice."""
        self.pool.drop(sequence.block_ids)
        sequence.block_ids = []

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Prove that the block tables of `sequences` and the free list account for every block."""
        holders: Counter[int] = Counter()
        for sequence in sequences:
            if len(set(sequence.block_ids)) != len(sequence.block_ids):
                raise InvariantError(f"sequence {sequence.sequence_id} holds a block twice")
            if self.num_blocks_for(sequence.num_computed_tokens) > len(sequence.block_ids):
                raise InvariantError(f"sequence {sequence.sequence_id} has KV outside of its blocks")
            holders.update(sequence.block_ids)
        self.pool.check_integrity(holders)
