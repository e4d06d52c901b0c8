"""Who holds which KV block of one executor, from the changes of block tables in step records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cadenza.v1 import admin_pb2

FREE, CACHED = 0, -1
"""In place of a holder's sequence id; ids begin at 1."""


class BlockMap:
    """The blocks of one executor's device pool.

    A record names the blocks that a sequence gets; from when it ends they are free. Full blocks of the prefix cache
    keep their content until another sequence gets them: they are shown as cached until then. Sequences from before the
    first record are not known, nor are blocks that change hands by copy-on-write before their table is sent again.
    """

    def __init__(self, block_size: int = 0, *, has_cache: bool = True) -> None:
        self.block_size = block_size
        self.has_cache = has_cache
        self._tables: dict[int, list[int]] = {}
        """By sequence id."""
        self._holders: dict[int, list[int]] = {}
        """By block."""
        self._cached: set[int] = set()
        self._changed: set[int] = set()

    @property
    def num_held(self) -> int:
        """Blocks that known sequences hold."""
        return len(self._holders)

    @property
    def num_shared(self) -> int:
        """Of these, blocks of several sequences."""
        return sum(len(each) > 1 for each in self._holders.values())

    def add(self, change: admin_pb2.BlockTableChange) -> None:
        """Apply a change of a sequence's block table."""
        self.change(change.sequence_id, change.appended, cleared=change.cleared)

    def change(self, sequence_id: int, appended: Sequence[int], *, cleared: bool) -> None:
        """Apply a change of a sequence's block table."""
        if cleared:
            self.release(sequence_id)
        if not appended:
            return
        self._tables.setdefault(sequence_id, []).extend(appended)
        for block in appended:
            self._holders.setdefault(block, []).append(sequence_id)
            self._cached.discard(block)
        self._changed.update(appended)

    def release(self, sequence_id: int, num_tokens: int | None = None) -> None:
        """A sequence holds nothing any more. num_tokens: those with KV; None: all of its blocks but the last."""
        table = self._tables.pop(sequence_id, [])
        num_full = len(table) - 1 if num_tokens is None or not self.block_size else num_tokens // self.block_size
        for place, block in enumerate(table):
            holders = self._holders.get(block)
            if holders is None or sequence_id not in holders:
                continue
            holders.remove(sequence_id)
            if not holders:
                del self._holders[block]
                if self.has_cache and place < num_full:
                    self._cached.add(block)
        self._changed.update(table)

    def keep_only(self, sequence_ids: Iterable[int]) -> None:
        """Release all other sequences."""
        for sequence_id in set(self._tables).difference(sequence_ids):
            self.release(sequence_id)

    def clear(self) -> None:
        """The pool is empty, as that of a new process."""
        self._changed.update(self._holders, self._cached)
        self._tables.clear()
        self._holders.clear()
        self._cached.clear()

    def take_changes(self) -> list[int]:
        """What has changed since the last call: for each block its number, holder and number of holders."""
        changed, self._changed = sorted(self._changed), set()
        return self._states(changed)

    def states(self) -> list[int]:
        """The same of all blocks that are not free."""
        return self._states(sorted({*self._holders, *self._cached}))

    def _states(self, blocks: Iterable[int]) -> list[int]:
        states: list[int] = []
        for block in blocks:
            holders = self._holders.get(block)
            holder = holders[0] if holders else CACHED if block in self._cached else FREE
            states += (block, holder, len(holders or ()))
        return states
