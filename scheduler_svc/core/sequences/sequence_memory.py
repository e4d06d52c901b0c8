"""What a sequence holds in a lane's pools: blocks, windows, a state; and what of it is in the prefix cache."""

from __future__ import annotations

from scheduler_svc.core.sequences.sequence_tokens import SequenceTokens
from scheduler_svc.core.sequences.shared_blocks import SharedBlocks


class SequenceMemory(SequenceTokens):
    """Tokens, and the pages that hold what an executor has computed for them."""

    __slots__ = (
        "block_ids",
        "cache_node",
        "host_block_ids",
        "num_cached_blocks",
        "prefix_ends",
        "shared_blocks",
        "state_pages",
        "windows",
    )

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        super().__init__(prompt_ids)
        self.block_ids: list[int] = []
        self.host_block_ids: list[int] = []
        """Blocks of its KV while it is swapped out."""
        self.shared_blocks: SharedBlocks | None = None
        """The first blocks of its table, on the device or the host, if other sequences of its group share them."""
        self.windows: list[range] = []
        """By KV group with a window: the indexes of the blocks that it holds there. See `memory.window_tables`."""
        self.state_pages: tuple[int, ...] = ()
        """The pages of its recurrent state, in the pool where its blocks are. See `memory.state_tables`."""
        self.prefix_ends: tuple[int, ...] = ()
        """Numbers of blocks: with windows or states, where the prefix that it found at its last admission ends, and
        where the KV without windows ends that was there. Others may begin alike and end there too."""
        self.num_cached_blocks = 0
        """Number of leading blocks that are in the prefix cache, or were hits."""
        self.cache_node: int | None = None
        """The prefix cache node of the last of these blocks."""

    def forget_memory(self) -> None:
        """The pools are lost."""
        self.block_ids, self.host_block_ids, self.shared_blocks = [], [], None
        self.windows, self.state_pages = [], ()
