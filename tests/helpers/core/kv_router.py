"""What a router makes of KV events: the set of blocks, with its own checks that each event fits what came before."""

from __future__ import annotations

from collections.abc import Iterable

from cadenza.v1 import admin_pb2 as pb


class Router:
    """Follows a subscription."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], tuple[int | None, tuple[int, ...]]] = {}
        """(parent's hash, token ids) by hash and tier."""
        self.last = 0
        """The number of the last batch."""
        self.num_states = 0

    def take(self, batch: pb.SubscribeKvEventsResponse) -> None:
        """Follow a batch; numbers must ascend by one, but for a state."""
        begins = batch.HasField("state") and batch.state.index == 0
        assert begins or batch.sequence_number == self.last + 1
        self.last = batch.sequence_number
        self.num_states += begins
        for event in batch.events:
            match event.WhichOneof("event"):
                case "cleared":
                    self.blocks.clear()
                case "removed":
                    for block_hash in event.removed.block_hashes:
                        del self.blocks[block_hash, event.removed.tier]
                case "stored":
                    self._store(event.stored)

    def _store(self, stored: pb.KvBlocksStored) -> None:
        parent = stored.parent_hash if stored.HasField("parent_hash") else None
        assert parent is None or any((parent, tier) in self.blocks for tier in pb.KvTier.values())
        size = stored.block_size
        assert len(stored.token_ids) == size * len(stored.block_hashes)
        for index, block_hash in enumerate(stored.block_hashes):
            assert (block_hash, stored.tier) not in self.blocks
            ids = tuple(stored.token_ids[index * size : (index + 1) * size])
            self.blocks[block_hash, stored.tier] = parent, ids
            parent = block_hash

    def num_cached(self, token_ids: Iterable[int], size: int) -> int:
        """Length of the longest prefix of these tokens that is cached in any tier, found by following hashes."""
        ids, parent, count = list(token_ids), None, 0
        children = {(before, block): block_hash for (block_hash, _), (before, block) in self.blocks.items()}
        while (parent := children.get((parent, tuple(ids[count : count + size])))) is not None:
            count += size
        return count
