"""The states of rows and the copies of them, as a model that knows what every page of a state holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scheduler_svc.core.memory.block_manager import BlockManager
from scheduler_svc.core.memory.paged_pool import PagedPool

if TYPE_CHECKING:
    from tests.helpers.core.block_books import Row

_EVERY = 3
"""Of so many blocks that a row computes, the state behind one is saved."""


class StateBooks:
    """What executors do with states. A page holds a part of a state: all tokens before it, with their scope."""

    blocks: BlockManager
    size: int
    device: list[list[Any]]

    def __init__(self) -> None:
        self.num_steps = 0
        self._armed: dict[tuple[int, int], tuple[int, ...]] = {}
        """By row and number of blocks: where to."""
        self._made: list[tuple[int, int]] = []

    @property
    def num_saving_pages(self) -> int:
        """Pages that copies of rows hold that go on."""
        snapshots = self.blocks.snapshots
        if snapshots is None or self.blocks.states is None:
            return 0
        return sum(map(len, snapshots._of.values())) * self.blocks.states.num_pages

    def arm(self, row: Row, num_tokens: int) -> None:
        """Save the states behind some of the blocks that a row is about to fill, if there is room."""
        snapshots, states = self.blocks.snapshots, self.blocks.states
        if snapshots is None or states is None or not row.group.spec.uses_prefix_cache:
            return
        first, last = -(-row.num_computed_tokens // self.size), (row.num_computed_tokens + num_tokens) // self.size
        for end in range(max(1, first), last + 1):
            is_due = (row.sequence_id + end) % _EVERY == 0 and not snapshots.is_armed(row.sequence_id, end)
            if is_due and self.blocks.num_free >= 2 * states.num_pages:
                self._armed[row.sequence_id, end] = snapshots.arm(row, row.sequence_id, end)

    def compute_state(self, row: Row, context_len: int) -> None:
        """A step has computed a row behind this context: copies are made, and the state stands behind all."""
        self.read_state(row, context_len)
        for (row_id, end), pages in list(self._armed.items()):
            if row_id == row.sequence_id and context_len <= end * self.size <= row.num_written:
                self._put(pages, row, end * self.size)
                del self._armed[row_id, end]
                self._made.append((row_id, end))
        self._put(row.state_pages, row, row.num_written)

    def read_state(self, row: Row, position: int) -> None:
        """A row's state must stand behind its tokens up to here; at position 0 it is not read."""
        if position and row.state_pages:
            read = [self.device[page][0] for page in row.state_pages]
            assert read == [("state", part, row.kv(position - 1)) for part in range(len(read))]

    def release(self, row: Row) -> None:
        """A row loses its slot."""
        if self.blocks.snapshots is not None:
            self.blocks.snapshots.release(row, self.num_steps)
            self._armed = {key: pages for key, pages in self._armed.items() if key[0] != row.sequence_id}

    def end_step(self, *, is_told: bool) -> None:
        """The result of a step is in; it may name the copies that were made later, with those of the next one."""
        snapshots = self.blocks.snapshots
        self.num_steps += 1
        if snapshots is None or not is_told:
            return
        for row_id, end in self._made:
            snapshots.take_made(row_id, end * self.size)
        self._made = []
        snapshots.pass_step(self.num_steps)

    def check_snapshots(self) -> None:
        """A cached block has a copy of the state behind its last token, as its KV says."""
        pool = self.blocks.pool
        if self.blocks.states is None or not isinstance(pool, PagedPool) or not pool.block_pages:
            return
        for block_id, pages in pool.windows[-1].items():
            _, _, kv = self.device[pool.full_pages_of(block_id)[0]][-1]
            assert [self.device[page][0] for page in pages] == [("state", part, kv) for part in range(len(pages))]

    def _put(self, pages: tuple[int, ...], row: Row, position: int) -> None:
        for part, page in enumerate(pages):
            self.device[page] = [("state", part, row.kv(position - 1))] * self.size if position else [None] * self.size
