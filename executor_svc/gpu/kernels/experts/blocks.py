"""Routed rows in blocks of one expert each, counted in the GPU's memory: what the products of experts are launched for.

The number of rows of a block is fixed by the step's sizes, and so is the number of programs; those of blocks that there
are not end at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS = (8, 16, 32, 64, 128)
"""The most rows of a block, ascending: of these the products have tiles."""
BLOCK_WORDS = 4
"""Of a block: its expert, its first routed row, its number of rows, and nothing."""
WORDS = tl.constexpr(BLOCK_WORDS)


@triton.jit
def block_of(blocks, number):
    """Return a block's expert and first routed row, int64, and its number of rows."""
    at = blocks + number * WORDS
    return tl.load(at).to(tl.int64), tl.load(at + 1).to(tl.int64), tl.load(at + 2)


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """The blocks of a step of fixed sizes."""

    table: Tensor
    """[any, BLOCK_WORDS] int32"""
    count: Tensor
    """[1] int32: of those that there are."""
    most: int
    """Of those that there can be."""
    rows: int
    """Of a block at most; one of BLOCK_ROWS."""


def block_rows(num_tokens: int, num_experts: int, num_chosen: int) -> int:
    """Return the rows of a block: at least half as many more as an expert has on average, up to the largest."""
    wanted = 1.5 * num_tokens * num_chosen / num_experts
    return next((rows for rows in BLOCK_ROWS if wanted <= rows), BLOCK_ROWS[-1])


def most_blocks(num_tokens: int, num_experts: int, num_chosen: int, rows: int | None = None) -> int:
    """Return how many blocks of `rows` rows a step can have: every expert's last one may have a single row.

    rows: default: as of `block_rows`.
    """
    routed = num_tokens * num_chosen
    begun = min(routed, num_experts)
    return begun + (routed - begun) // (rows or block_rows(num_tokens, num_experts, num_chosen))


def tokens_of_blocks(num_experts: int, num_chosen: int) -> list[int]:
    """Return the most tokens of a step with blocks of each size but the largest, ascending."""
    return [max(1, int(rows * num_experts / (1.5 * num_chosen))) for rows in BLOCK_ROWS[:-1]]
