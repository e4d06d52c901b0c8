"""The prefix cache: maps a prefix of full blocks of tokens to the blocks that store its KV.

A node is one full block of tokens that follows the tokens of its parent. Its key is the parent's id and the tokens
themselves, so a lookup compares contents and two prefixes are never confused by a hash collision. This is the chained
block scheme of vLLM's automatic prefix caching (docs.vllm.ai, "Automatic Prefix Caching"), with node ids, which are
never reused, in place of parent hashes.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import NamedTuple

from scheduler_svc.core.errors import InvariantError

Root = tuple[str, bytes, bytes]
"""Owner, cache salt and hash of the adapter's content: only chains with the same root share blocks. The owner is a
tenant, or a name under which tenants share prefixes, after a NUL: tenants have none in their names."""
Parent = int | Root
"""The predecessor of a block of tokens: another node, or a root."""
Key = tuple[Parent, bytes]
"""Of a node: what it follows, and the tokens of its block, as `pack_blocks` returns them."""
Change = tuple[int, Key | None, int | None]
"""(node, its key if it is new, its place; None: it was removed)"""


class WindowsChange(NamedTuple):
    """A node's block has pages in these window groups."""

    node: int
    groups: int
    """One bit for each group, the first one lowest."""


_MAX_CHANGES = 16_384
"""Maximum number of remembered changes; beyond it the older half is dropped."""


@dataclass(slots=True)
class PrefixCounts:
    """Counts since the start, in tokens. They outlive the pools: a lost executor's cache is gone, its counts stay."""

    num_queried: int = 0
    """Number of tokens of admitted sequences that looked up the prefix cache."""
    num_hits: int = 0
    """Number of these tokens that were found."""
    num_host_hits: int = 0
    """Number of these tokens found in the host pool."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The longest cached prefix of a sequence that is worth using, at the time of the lookup."""

    nodes: tuple[int, ...] = ()
    """One for each block, first to last."""
    num_tokens: int = 0
    num_queried: int = 0
    """Number of tokens of the sequence, if it may use the cache."""
    num_idle: int = 0
    """Number of its device blocks without holders: using them takes them from the free blocks."""
    num_host: int = 0
    """Number of its host blocks: each needs a device block and a swap-in."""
    num_matched: int = 0
    """Number of blocks whose tokens are cached, with those behind it at which no window is whole."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks that need not be computed."""
        return len(self.nodes)

    def num_to_take(self, num_blocks: int) -> int:
        """Free device blocks that a sequence of `num_blocks` blocks takes with this prefix, for `can_take`."""
        return num_blocks - len(self.nodes) + self.num_idle + self.num_host


NO_PREFIX = CachedPrefix()
"""The lookup result of a sequence that may not use the cache."""


def host_place(host_block_id: int) -> int:
    """The place of a host block, and its inverse. A device block's place is its id."""
    return ~host_block_id


def pack_blocks(token_ids: Ids[int], size: int) -> list[bytes]:
    """The contents of full blocks with these tokens: `size` token ids each, of 4 bytes."""
    count, width = len(token_ids), 4 * size
    packed = struct.pack(f"{count}I", *token_ids)
    return [packed[start : start + width] for start in range(0, 4 * count, width)]


class PrefixCache:
    """Nodes by parent and tokens, each with its place: a device block id, or a negative number for a host block.

    The tokens of a node are bytes, as `pack_blocks` returns them.
    """

    def __init__(self) -> None:
        self._nodes: dict[tuple[Parent, bytes], int] = {}
        self._keys: dict[int, tuple[Parent, bytes]] = {}
        self._places: dict[int, int] = {}
        self._last_node = 0
        self._changed: list[int] = []
        """The nodes removed or moved last, the latest at the end."""
        self._num_dropped_changes = 0
        self._noted: list[Change | WindowsChange] | None = None
        """Changes since the last `take_noted`, additions too; None: nobody watches."""
        self.windows_at: Callable[[int], int] | None = None
        """The window groups in which the block at a place has pages, as in `WindowsChange`; None: there are none."""
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, node: int) -> bool:
        return node in self._keys

    @property
    def next_node(self) -> int:
        """The id of the node that is added next. Ids ascend."""
        return self._last_node + 1

    def nodes_from(self, first: int) -> list[int]:
        """The nodes with this id or a later one, the latest first."""
        return list(itertools.takewhile(lambda node: node >= first, reversed(self._keys)))

    def latest(self, most: int) -> list[int]:
        """At most so many nodes, the latest first."""
        return list(itertools.islice(reversed(self._keys), most))

    @property
    def num_changes(self) -> int:
        """Number of nodes removed or moved so far."""
        return self._num_dropped_changes + len(self._changed)

    def changed_since(self, num_changes: int) -> list[int] | None:
        """The nodes removed or moved after the first `num_changes` changes; None if they are not known any more."""
        first = num_changes - self._num_dropped_changes
        return self._changed[first:] if first >= 0 else None

    @property
    def present(self) -> Container[Key]:
        """The keys of all nodes."""
        return self._nodes

    def find(self, parent: Parent, content: bytes) -> int | None:
        """The node of these tokens after that parent."""
        return self._nodes.get((parent, content))

    def follow(self, parent: Parent, contents: Iterable[bytes]) -> list[int]:
        """The nodes of these blocks, one after the other, after that parent, up to the first that is not cached."""
        found: list[int] = []
        get = self._nodes.get
        for content in contents:
            node = get((parent, content))
            if node is None:
                break
            found.append(node)
            parent = node
        return found

    def add(self, parent: Parent, content: bytes, place: int) -> int:
        """Add a new node; returns its id."""
        self._last_node = node = self._last_node + 1
        key = parent, content
        self._nodes[key] = node
        self._keys[node] = key
        self._places[node] = place
        if self._noted is not None:
            self._noted.append((node, key, place))
            self.note_windows(node)
        return node

    def place(self, node: int) -> int:
        """The place of the node's KV; raises InvariantError if the node was removed."""
        place = self._places.get(node)
        if place is None:
            raise InvariantError(f"node {node} has left the prefix cache")
        return place

    def places(self, nodes: Iterable[int]) -> list[int]:
        """The places of present nodes."""
        return list(map(self._places.__getitem__, nodes))

    def put(self, node: int, place: int) -> None:
        """Record that the node's KV has moved."""
        self._places[node] = place
        self._note_change(node)
        if self._noted is not None:
            self._noted.append((node, None, place))
            self.note_windows(node)

    def parent_node(self, node: int) -> int | None:
        """The node's parent, which may itself be removed; None for a first node or a removed one."""
        key = self._keys.get(node)
        return key[0] if key and isinstance(key[0], int) else None

    def is_reachable(self, node: int) -> bool:
        """Whether a lookup can reach the node: its parent is present, or a root."""
        parent = self._keys[node][0]
        return isinstance(parent, tuple) or parent in self._keys

    def remove(self, node: int) -> None:
        """Remove a node. Its descendants stay, unreachable, until their blocks are evicted too."""
        del self._nodes[self._keys.pop(node)]
        del self._places[node]
        self._note_change(node)
        if self._noted is not None:
            self._noted.append((node, None, None))

    @property
    def num_noted(self) -> int:
        """Number of changes noted so far, for `take_noted`."""
        return self._num_taken + (len(self._noted) if self._noted is not None else 0)

    def note_windows(self, node: int) -> None:
        """Note in which window groups the block of a node has pages now, if changes are noted."""
        if self._noted is not None and self.windows_at is not None:
            self._noted.append(WindowsChange(node, self.windows_at(self._places[node])))

    def watch(self, first_uncertain: int) -> list[Change | WindowsChange]:
        """Note all changes from now on; returns the present nodes before this one as additions, parents first.

        Later nodes count as added now.
        """
        present: list[Change | WindowsChange] = [(node, key, self._places[node]) for node, key in self._keys.items()]
        if self.windows_at is not None:
            present += [WindowsChange(node, self.windows_at(place)) for node, place in self._places.items()]
        self._noted = [change for change in present if change[0] >= first_uncertain]
        return [change for change in present if change[0] < first_uncertain]

    def end_watch(self) -> None:
        """Stop noting changes."""
        self._num_taken, self._noted = self.num_noted, None

    def take_noted(self, num_certain: int) -> list[Change | WindowsChange]:
        """The changes that were noted and not taken yet, up to the first `num_certain` of all that ever were noted."""
        if self._noted is None:
            return []
        count = max(0, num_certain - self._num_taken)
        taken, self._noted = self._noted[:count], self._noted[count:]
        self._num_taken += len(taken)
        return taken

    def _note_change(self, node: int) -> None:
        changed = self._changed
        changed.append(node)
        if len(changed) == _MAX_CHANGES:
            self._num_dropped_changes += _MAX_CHANGES // 2
            del changed[: _MAX_CHANGES // 2]

    def check_integrity(self, places: Iterable[tuple[int, int]]) -> None:
        """Check that these (node, place) pairs are exactly what is cached; raises InvariantError."""
        if dict(places) != self._places:
            raise InvariantError("the prefix cache and the pools disagree about cached blocks")
        if {node: key for key, node in self._nodes.items()} != self._keys or self._keys.keys() != self._places.keys():
            raise InvariantError("the prefix cache has a key without a node, or a node without a key")
        if any(isinstance(parent, int) and parent >= node for node, (parent, _) in self._keys.items()):
            raise InvariantError("a node of the prefix cache is older than its parent")
