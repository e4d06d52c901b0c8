"""KV groups: sets of layers that keep the KV of the same positions, in pages of one pool.

All groups have the same block size in tokens. What the core calls a block is one position's block in every group: the
pages of the group without a window as long as somebody holds the block, those of each window group as long as somebody
may still read them there (docs/decisions/0061). Lanes of one group without a window and one page a block have none of
this: a block is a page.

A sequence of a model with recurrent layers has one state besides, in pages of the same pool (docs/decisions/0071).
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass

_SPARE_TOKENS = 4
"""Positions before a window that are kept at least: one for each plan in flight, whose result may take a token back."""
_MIN_CHUNK = 2048
"""Tokens of a chunk that are always allowed: shorter chunks would cost speed, longer ones need more pages."""
_LEAST_INTERVAL, _MOST_INTERVAL, _INTERVAL_WITHOUT_FULL = 256, 4096, 1024
"""Tokens between the windows of a long prefix that are kept longer than others; see `GroupSizes.interval`."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """A set of layers with one window and one number of pages for each block."""

    index: int
    window: int | None = None
    """Number of the last positions that a row reads, its own included; None: all."""
    pages_per_block: int = 1


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """The pages that sequences need in several KV groups, or in one with a window or several pages a block."""

    block_size: int
    full_pages: int
    """Pages of a block in the group without a window; 0: there is none."""
    windows: tuple[KVGroup, ...]
    """The groups with a window."""
    max_chunk: int
    """The most tokens of a sequence in one step."""
    most_ahead: int
    """The most tokens behind its computed ones for which a sequence holds pages."""
    state_pages: int = 0
    """Pages of the recurrent state of a sequence; 0: there is none."""

    @property
    def extra_pages(self) -> tuple[int, ...]:
        """Pages of what a cached block may have beside its KV without a window: in each window group, then of a state
        behind it."""
        in_windows = tuple(group.pages_per_block for group in self.windows)
        return (*in_windows, self.state_pages) if self.state_pages else in_windows

    @property
    def extra_reads(self) -> tuple[int, ...]:
        """By each of these, the most full blocks that must have it so that a sequence can go on behind the last."""
        in_windows = tuple(self.num_read(group.window or 0) for group in self.windows)
        return (*in_windows, 1) if self.state_pages else in_windows

    @property
    def block_pages(self) -> int:
        """Pages of a block that is in the window of every group."""
        return self.full_pages + sum(group.pages_per_block for group in self.windows)

    def num_kept(self, window: int) -> int:
        """Number of the last positions, the next row's own included, that a sequence keeps in a window group.

        Of whole blocks: then a decode needs no more of them at once than the chunks of one token of a sequence that
        comes back.
        """
        return -(-(window + _SPARE_TOKENS) // self.block_size) * self.block_size

    def first_block(self, window: int, context_len: int) -> int:
        """The first block of a window group that a sequence with so many computed tokens keeps."""
        return max(0, context_len + 1 - self.num_kept(window)) // self.block_size

    def num_read(self, window: int) -> int:
        """The most full blocks of a window group that the row after a full block reads."""
        return -(-(window - 1) // self.block_size)

    @property
    def interval(self) -> int:
        """Blocks from one window, and one saved state, to the next of those in the middle of a long prefix.

        A power of two of tokens, at which they take about as many pages as the prefix without them.
        """
        num_pages = self.state_pages
        num_pages += sum(group.pages_per_block * self.num_read(group.window or 0) for group in self.windows)
        if not self.full_pages:
            return max(1, _INTERVAL_WITHOUT_FULL // self.block_size)
        num_tokens = num_pages * self.block_size // self.full_pages
        num_tokens = min(max(_LEAST_INTERVAL, 1 << max(0, num_tokens - 1).bit_length()), _MOST_INTERVAL)
        return max(1, num_tokens // self.block_size)

    def opening(self, window: int, num_found: int, num_blocks: int, chunk: int) -> range:
        """The blocks of a window group that a new table of so many blocks holds, to compute chunks of so many tokens
        behind the first `num_found` blocks, which are computed."""
        first = max(0, num_found - self.num_read(window))
        end = self.first_block(window, num_found * self.block_size) + self.quota(window, chunk)
        return range(first, max(first, min(num_blocks, end)))

    def quota(self, window: int, chunk: int) -> int:
        """The most blocks of a window group that a sequence needs at once to compute chunks of so many tokens.

        With the token after the chunk: no chunk ends before a last token that lacks pages.
        """
        # The most blocks that so many positions in a row touch.
        return (self.num_kept(window) + chunk - 2) // self.block_size + 2

    def num_pages(self, num_blocks: int, chunk: int = 1) -> int:
        """Pages of the first blocks and the state of a sequence that is to compute chunks of so many tokens."""
        num_pages = self.full_pages * num_blocks + self.state_pages
        for group in self.windows:
            num_pages += group.pages_per_block * min(num_blocks, self.quota(group.window or 0, chunk))
        return num_pages

    def capacity(self, num_pages: int, most_tokens: int) -> int:
        """Number of tokens of one sequence that so many pages hold; at most `most_tokens`."""
        least, most = 0, -(-most_tokens // self.block_size)
        while least < most:
            middle = (least + most + 1) // 2
            if self.num_pages(middle) <= num_pages:
                least = middle
            else:
                most = middle - 1
        return min(most_tokens, least * self.block_size)


def group_sizes(
    groups: Ids[KVGroup],
    block_size: int,
    max_num_batched_tokens: int,
    max_drafts: int = 0,
    pages_per_state: int = 0,
) -> GroupSizes | None:
    """The sizes of an executor with these groups and such a state; None: a block is a page, and there is no state."""
    groups = groups or (KVGroup(0),)
    if not pages_per_state and len(groups) == 1 and groups[0].window is None and groups[0].pages_per_block == 1:
        return None
    windows = tuple(group for group in groups if group.window is not None)
    full_pages = sum(group.pages_per_block for group in groups if group.window is None)
    longest = max((group.window or 0 for group in windows), default=0)
    most = min(max_num_batched_tokens, max(_MIN_CHUNK, 2 * longest)) if windows else max_num_batched_tokens
    most_ahead = max(most, block_size + (1 + _SPARE_TOKENS) * (1 + max_drafts))
    return GroupSizes(block_size, full_pages, windows, most, most_ahead, pages_per_state)
