"""A pool of KV blocks with reference counts, in device or host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.sequences.shared_blocks import SharedBlocks


class BlockPool:
    """Block ids 0 to num_blocks - 1.

    Each block has one or more holders, or is *idle* (cached without holders), or is unused. Blocks that a group shares
    have one holder for all of its sequences.
    """

    block_pages: int = 1
    """Pages of every block; `paged_pool` has others."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        """By block, the number of its holders, where a group that shares it counts as one. See `num_holders`."""
        self.shared: dict[SharedBlocks, None] = {}
        """The blocks that groups share."""
        self.cached: dict[int, int] = {}
        """Cached blocks, each with the prefix cache node whose KV it stores."""
        self.num_shared_refs = 0
        """Blocks saved by sharing: sequences beyond the first of each block."""
        self.num_idle_changes = 0
        """Grows whenever a block becomes idle or is idle no longer."""
        # Popped from the end: the block freed last is used first, while it is warm in the cache.
        self._unused = list(range(num_blocks - 1, -1, -1))
        # The least recently used comes first. A plain dict would scan over the entries removed from its front.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Number of pages of blocks without holders, unused and idle: a block is a page."""
        return len(self._unused) + len(self._idle)

    @property
    def num_pages(self) -> int:
        """Number of pages."""
        return self.num_blocks

    def num_pages_of(self, block_ids: Collection[int]) -> int:
        """Number of pages of these blocks."""
        return len(block_ids)

    @property
    def num_unused(self) -> int:
        """Number of blocks without holders that are not cached."""
        return len(self._unused)

    @property
    def num_idle(self) -> int:
        """Number of cached blocks without holders."""
        return len(self._idle)

    @property
    def num_idle_pages(self) -> int:
        """Number of pages that are cached and have no holder."""
        return len(self._idle)

    def take(self, count: int) -> list[int]:
        """Take `count` unused blocks, each with one holder; raises InvariantError if there are too few."""
        if count > len(self._unused):
            raise InvariantError(f"{count} blocks needed, {len(self._unused)} unused")
        split = len(self._unused) - count
        taken = self._unused[split:][::-1]
        del self._unused[split:]
        for block_id in taken:
            self.ref_counts[block_id] = 1
        return taken

    def share(self, block_id: int) -> None:
        """Add a holder to a held or idle block; raises InvariantError if it is unused."""
        count = self.ref_counts[block_id]
        if count:
            self.num_shared_refs += 1
        elif block_id in self._idle:
            del self._idle[block_id]
            self.num_idle_changes += 1
        else:
            raise InvariantError(f"block {block_id} is unused and cannot be shared")
        self.ref_counts[block_id] = count + 1

    def share_all(self, block_ids: Iterable[int]) -> None:
        """Add a holder to each of these blocks, held or idle: as `share`, in a third of the time."""
        counts, idle, num_shared, num_idle = self.ref_counts, self._idle, 0, len(self._idle)
        for block_id in block_ids:
            count = counts[block_id]
            if count:
                num_shared += 1
            elif block_id in idle:
                del idle[block_id]
            else:
                raise InvariantError(f"block {block_id} is unused and cannot be shared")
            counts[block_id] = count + 1
        self.num_shared_refs += num_shared
        if len(idle) != num_idle:
            self.num_idle_changes += 1

    def start_sharing(self, block_ids: list[int]) -> SharedBlocks:
        """Let a group share blocks. The caller's sequence holds them already, and is the first holder of the group."""
        shared = SharedBlocks(block_ids)
        self.shared[shared] = None
        return shared

    def join(self, shared: SharedBlocks) -> None:
        """Add a sequence to the holders of shared blocks."""
        shared.num_holders += 1
        self.num_shared_refs += len(shared.block_ids)

    def leave(self, shared: SharedBlocks) -> bool:
        """Remove a sequence from the holders of shared blocks; True: it was the last, and must now drop the blocks."""
        shared.num_holders -= 1
        if shared.num_holders:
            self.num_shared_refs -= len(shared.block_ids)
            return False
        del self.shared[shared]
        return True

    @property
    def num_holders(self) -> list[int]:
        """By block, the number of its holders, where each sequence of a group counts."""
        counts = self.ref_counts.copy()
        for shared in self.shared:
            for block_id in shared.block_ids:
                counts[block_id] += shared.num_holders - 1
        return counts

    def drop(self, block_ids: Iterable[int]) -> None:
        """Remove one holder from each block; a block without holders is idle if it is cached, else unused."""
        counts, unused, cached = self.ref_counts, self._unused, self.cached
        if not cached:
            # Most often there is one holder of each, and no Python bytecode is needed to find that out.
            block_ids = list(block_ids)
            if list(map(counts.__getitem__, block_ids)).count(1) == len(block_ids) == len(set(block_ids)):
                for block_id in block_ids:
                    counts[block_id] = 0
                unused += block_ids
                return
        num_idle = len(self._idle)
        for block_id in block_ids:
            count = counts[block_id] - 1
            if count < 0:
                raise InvariantError(f"block {block_id} is freed twice")
            counts[block_id] = count
            if count:
                self.num_shared_refs -= 1
            elif block_id in cached:
                self._idle[block_id] = None
            else:
                unused.append(block_id)
        if len(self._idle) != num_idle:
            self.num_idle_changes += 1

    def cache(self, block_id: int, node: int) -> None:
        """Mark a held block as cached under a node."""
        if block_id in self.cached or self.ref_counts[block_id] == 0:
            raise InvariantError(f"block {block_id} is cached already, or has no holder")
        self.cached[block_id] = node

    def uncache(self, block_id: int) -> int:
        """Mark a cached block as not cached; returns its node."""
        node = self.cached.pop(block_id)
        if self.ref_counts[block_id] == 0:
            del self._idle[block_id]
            self.num_idle_changes += 1
            self._unused.append(block_id)
        return node

    def evict(self) -> tuple[int, int]:
        """Make the least recently used idle block unused; returns the block and its node."""
        block_id, _ = self._idle.popitem(last=False)
        self.num_idle_changes += 1
        self._unused.append(block_id)
        return block_id, self.cached.pop(block_id)

    def check_integrity(self, holders: dict[int, int]) -> None:
        """Check that `holders` (block id to number of holders), idle and unused blocks account for every block."""
        counts = [0] * self.num_blocks
        for block_id, number in holders.items():
            counts[block_id] = number
        if counts != self.ref_counts:
            pairs = enumerate(zip(counts, self.ref_counts, strict=True))
            wrong = {block_id: pair for block_id, pair in pairs if pair[0] != pair[1]}
            raise InvariantError(f"blocks with other holders than their ref counts: {wrong}")
        held, unused = {block_id for block_id, number in holders.items() if number}, {*self._unused}
        if self._idle.keys() != self.cached.keys() - held:
            raise InvariantError(f"idle: {[*self._idle]}, cached without holders: {self.cached.keys() - held}")
        if len(unused) != len(self._unused):
            raise InvariantError("a block is in the unused list twice")
        # Not by a set of all blocks, which would take most of the time.
        used = held | self.cached.keys()
        are_known = not unused or (min(unused) >= 0 and max(unused) < self.num_blocks)
        if not (are_known and unused.isdisjoint(used) and len(unused) + len(used) == self.num_blocks):
            raise InvariantError("a block is unused and held or cached, or neither")
        counts = self.num_holders
        if self.num_shared_refs != sum(counts) - len(counts) + counts.count(0):
            raise InvariantError(f"{self.num_shared_refs} shared references do not match the ref counts")
