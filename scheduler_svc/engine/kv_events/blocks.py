"""KV blocks as routers know them: by the hash of all that they depend on, equal in every process.

A block's hash is BLAKE2b with 8 bytes over its predecessor's hash and its token ids, 4 bytes little-endian each. The
first block of a text follows 8 zero bytes; where requests have an adapter, a cache salt or an owner, 8 bytes of BLAKE2b
over these, each with its length before it (docs/decisions/0050-kv-events.md).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

from scheduler_svc.core.memory.prefix_cache import Root

HASH_BYTES = 8
_TOKEN_BYTES = 4
_PLAIN: Root = ("", b"", b"")
_SHARED = "\0"


class Tier(Enum):
    """The memory that a block is in."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A full block of tokens after others."""

    digest: bytes
    parent: Block | None
    """None: it begins a text."""
    root: Root
    content: bytes
    """Its token ids, as `pack_blocks` returns them."""

    @property
    def num_tokens(self) -> int:
        """Number of its token ids."""
        return len(self.content) // _TOKEN_BYTES


def first_block(root: Root, content: bytes) -> Block:
    """The block that begins a text."""
    return Block(_digest(_seed(root) + content), None, root, content)


def next_block(parent: Block, content: bytes) -> Block:
    """The block that follows another one."""
    return Block(_digest(parent.digest + content), parent, parent.root, content)


def block_hashes(blocks: Sequence[Block]) -> tuple[int, ...]:
    """Their hashes, as signed numbers of 64 bits."""
    return struct.unpack(f">{len(blocks)}q", b"".join(block.digest for block in blocks))


def token_ids_of(blocks: Sequence[Block]) -> list[int]:
    """The token ids of all, one block after the other."""
    return memoryview(b"".join(block.content for block in blocks)).cast("I").tolist()


def owner_of(root: Root) -> str:
    """Whose requests alone find the blocks; empty: all do. Of tenants that share prefixes: "shared:" and their name."""
    return f"shared:{root[0][1:]}" if root[0].startswith(_SHARED) else root[0]


def _seed(root: Root) -> bytes:
    if root == _PLAIN:
        return bytes(HASH_BYTES)
    parts = (root[0].encode(), root[1], root[2])
    return _digest(b"".join(len(part).to_bytes(4, "little") + part for part in parts))


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=HASH_BYTES).digest()
