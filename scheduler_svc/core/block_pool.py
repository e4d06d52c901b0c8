"""A pool of KV blocks with reference counts."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.core.errors import InvariantError


class BlockPool:
    """Block ids 0 to num_blocks - 1; each is free or held by one or more block tables."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        # Popped from the end: the block freed last is used first, while it is warm in the cache.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one holder; raises InvariantError if there are not as many."""
        if count > len(self._free):
            raise InvariantError(f"{count} blocks wanted, {len(self._free)} free")
        split = len(self._free) - count
        taken = self._free[split:][::-1]
        del self._free[split:]
        for block_id in taken:
            self.ref_counts[block_id] = 1
        return taken

    def share(self, block_id: int) -> None:
        """Add a holder to a held block."""
        if self.ref_counts[block_id] == 0:
            raise InvariantError(f"block {block_id} is free and cannot be shared")
        self.ref_counts[block_id] += 1

    def drop(self, block_ids: Iterable[int]) -> None:
        """Take a holder of each away; without holders a block is free."""
        counts, free = self.ref_counts, self._free
        for block_id in block_ids:
            count = counts[block_id]
            if count == 0:
                raise InvariantError(f"block {block_id} is freed twice")
            counts[block_id] = count - 1
            if count == 1:
                free.append(block_id)

    def check_integrity(self, holders: dict[int, int]) -> None:
        """Prove that `holders` (block id to number of holders) and the free list account for every block."""
        if len(set(self._free)) != len(self._free):
            raise InvariantError("a block is in the free list twice")
        free = set(self._free)
        for block_id, count in enumerate(self.ref_counts):
            if holders.get(block_id, 0) != count:
                raise InvariantError(f"block {block_id}: {holders.get(block_id, 0)} holders, ref count {count}")
            if (block_id in free) != (count == 0):
                raise InvariantError(f"block {block_id}: ref count {count}, free: {block_id in free}")
