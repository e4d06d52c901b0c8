"""What an item of the CPU's attention works on, as addresses and numbers in the code that is made."""

from __future__ import annotations

from dataclasses import dataclass, replace

from executor_svc.cpu.kernels.codegen.emit import Emitter, Int


@dataclass(frozen=True, slots=True)
class QueryTile:
    """The query tile and KV heads of an item."""

    row: Int
    tokens: Int
    position: Int
    head: Int
    """The first KV head."""
    heads: Int
    first_seen: Int
    """The first position that its first token attends to."""
    low: Int
    high: Int
    """Its tokens attend to keys of the sequence's blocks low to high - 1."""
    blocks: Int
    """Address of the sequence's block table."""
    stride: Int
    """Bytes from one block to the next."""
    keys: Int
    """Address of the first KV head's keys in block 0."""
    values: Int

    def of_head(self, index: Int, head_bytes: int) -> QueryTile:
        """Return the tile with one of its KV heads."""
        one = index.emit.integer(1)
        keys, values = self.keys + index * head_bytes, self.values + index * head_bytes
        return replace(self, head=self.head + index, heads=one, keys=keys, values=values)


@dataclass(frozen=True, slots=True)
class Work:
    """A tile, the tile that this thread will probably process next, and memory."""

    tile: QueryTile
    coming: QueryTile
    first: Int
    """Position of the first stored score."""
    queries: Int
    scores: Int
    sums: Int
    inverses: Int
    sinks: Int
    """Address of the sinks of all heads; only where there are some."""


def of_block(emit: Emitter, stride: Int, blocks: Int, base: Int, block: Int) -> Int:
    """Return the address of what lies at `base` in block 0, in the sequence's block with this index."""
    return base + emit.load_int32(blocks + block * 4) * stride
