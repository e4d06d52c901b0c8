"""The blocks that several sequences of a group have in common, which a pool counts once for all of them."""

from __future__ import annotations


class SharedBlocks:
    """The first blocks of several block tables: full blocks of the group's prompt.

    A pool counts it as one holder of each block, so that a sequence joins or leaves in constant time.
    """

    __slots__ = ("block_ids", "num_holders")

    def __init__(self, block_ids: list[int]) -> None:
        """Start with one holder."""
        self.block_ids = block_ids
        self.num_holders = 1
