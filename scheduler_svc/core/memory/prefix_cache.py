"""The prefix cache: which block holds the KV of which tokens after which others.

A node stands for one full block of tokens that follows the tokens of its parent. Its key is the parent's id and the
tokens themselves, so that a lookup compares contents and trusts no hash: two prefixes are never taken for one another.
As a chain of blocks this is the hash-block scheme of vLLM's automatic prefix caching (docs.vllm.ai, "Automatic Prefix
Caching"), with ids that are never used again in place of parent hashes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.errors import InvariantError

Root = tuple[str, bytes, int]
"""Tenant, cache salt and adapter index: only chains with the same root share blocks."""
Parent = int | Root
"""What a block of tokens follows: another node, or nothing."""


@dataclass(frozen=True, slots=True)
class Found:
    """The longest prefix of a sequence that is cached and worth using, as it was when it was looked up."""

    nodes: tuple[int, ...] = ()
    """One for each block, first to last."""
    num_tokens: int = 0
    num_queried: int = 0
    """Tokens of the sequence, if it may use the cache."""
    num_idle: int = 0
    """Device blocks of it that nobody holds: they stop being free when they are used."""
    num_host: int = 0
    """Blocks of it in the host pool: each takes a device block, and a swap-in."""

    @property
    def num_blocks(self) -> int:
        """Blocks that need not be computed."""
        return len(self.nodes)

    def num_to_take(self, num_blocks: int) -> int:
        """Free device blocks that a sequence of so many blocks takes when it uses this: as `can_take` wants it."""
        return num_blocks - len(self.nodes) + self.num_idle + self.num_host


NOTHING = Found()
"""What a sequence finds that may not use the cache."""


def on_host(host_block_id: int) -> int:
    """The place that is this host block; device blocks are their own places. The inverse is the same."""
    return ~host_block_id


class PrefixCache:
    """Nodes by parent and tokens, and the place of each: a device block, or a host block as a negative number."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[Parent, tuple[int, ...]], int] = {}
        self._keys: dict[int, tuple[Parent, tuple[int, ...]]] = {}
        self._places: dict[int, int] = {}
        self._last_node = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, node: int) -> bool:
        return node in self._keys

    def find(self, parent: Parent, token_ids: tuple[int, ...]) -> int | None:
        """The node of these tokens after that parent."""
        return self._nodes.get((parent, token_ids))

    def add(self, parent: Parent, token_ids: tuple[int, ...], place: int) -> int:
        """Make a node that is not there yet; returns its id."""
        self._last_node = node = self._last_node + 1
        key = parent, token_ids
        self._nodes[key] = node
        self._keys[node] = key
        self._places[node] = place
        return node

    def place(self, node: int) -> int:
        """Where the node's KV is; raises InvariantError if it is cached no more."""
        place = self._places.get(node)
        if place is None:
            raise InvariantError(f"node {node} has left the prefix cache")
        return place

    def put(self, node: int, place: int) -> None:
        """The node's KV has moved."""
        self._places[node] = place

    def parent_node(self, node: int) -> int | None:
        """The node before this one, though it may have left the cache; None for a first one, or one that has left."""
        key = self._keys.get(node)
        return key[0] if key and isinstance(key[0], int) else None

    def is_reachable(self, node: int) -> bool:
        """Can a lookup come this far: is the parent there?"""
        parent = self._keys[node][0]
        return isinstance(parent, tuple) or parent in self._keys

    def forget(self, node: int) -> None:
        """Its KV is gone. Nodes after it stay, out of reach, until their blocks are evicted too."""
        del self._nodes[self._keys.pop(node)]
        del self._places[node]

    def check_integrity(self, places: Iterable[tuple[int, int]]) -> None:
        """Prove that these (node, place) pairs are all that is cached; raises InvariantError."""
        if dict(places) != self._places:
            raise InvariantError("the prefix cache and the pools do not agree on what is cached where")
        if {node: key for key, node in self._nodes.items()} != self._keys or self._keys.keys() != self._places.keys():
            raise InvariantError("the prefix cache has a key without a node, or a node without a key")
        if any(isinstance(parent, int) and parent >= node for node, (parent, _) in self._keys.items()):
            raise InvariantError("a node of the prefix cache is older than its parent")
