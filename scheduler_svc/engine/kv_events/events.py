"""Events and batches of them, as subscribers get them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from scheduler_svc.engine.kv_events.blocks import Block, Tier

MAX_BATCH_BLOCKS = 1024
"""Blocks in one batch."""
MAX_BATCH_TOKENS = 16_384
"""Tokens of the blocks that are stored in one batch, unless one block has more: its message has 100 to 400 KB."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks, each the successor of the one before, are cached."""

    blocks: Sequence[Block]
    tier: Tier


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks have left a tier."""

    blocks: Sequence[Block]
    tier: Tier


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is cached."""


Event = Stored | Removed | Cleared
Change = tuple[Block, Tier, bool]
"""(block, tier, whether it is stored there from now on)"""


@dataclass(frozen=True, slots=True)
class StatePart:
    """Which part of the present state a batch is."""

    index: int
    count: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Events of one moment."""

    number: int
    time_ns: int
    """Nanoseconds since 1970."""
    events: Sequence[Event]
    part: StatePart | None = None
    """Of the present state; None: the batch is what changed."""


def grouped(changes: Iterable[Change]) -> Iterator[list[Event]]:
    """The changes as events, in their order, in lists of at most MAX_BATCH_BLOCKS blocks and MAX_BATCH_TOKENS."""
    events: list[Event] = []
    run: list[Block] = []
    kind: tuple[Tier, bool] | None = None
    num_blocks = num_tokens = 0

    def end_run() -> None:
        if kind is not None and run:
            tier, is_stored = kind
            events.append(Stored(tuple(run), tier) if is_stored else Removed(tuple(run), tier))
            run.clear()

    for block, tier, is_stored in changes:
        follows = kind == (tier, is_stored) and (not is_stored or (bool(run) and block.parent is run[-1]))
        num_own = block.num_tokens if is_stored else 0
        is_full = num_blocks == MAX_BATCH_BLOCKS or (num_blocks > 0 and num_tokens + num_own > MAX_BATCH_TOKENS)
        if is_full or not follows:
            end_run()
        if is_full:
            yield events
            events, num_blocks, num_tokens = [], 0, 0
        kind = tier, is_stored
        run.append(block)
        num_blocks += 1
        num_tokens += num_own
    end_run()
    if events:
        yield events


def net(changes: Iterable[Change]) -> list[Change]:
    """What the changes come to: what is stored, parents first, then what is removed, children first.

    Without blocks that came and went, or went and came: those of a lost step were never certain. Where the blocks have
    their parents, in whatever tier, before and after all changes, they have them after each of these.
    """
    first: dict[tuple[bytes, str], bool] = {}
    last: dict[tuple[bytes, str], Change] = {}
    for change in changes:
        name = change[0].digest, change[1].value
        first.setdefault(name, change[2])
        last[name] = change
    kept = [change for name, change in last.items() if first[name] is change[2]]
    stored = parents_first([change for change in kept if change[2]])
    return stored + parents_first([change for change in kept if not change[2]])[::-1]


def parents_first(changes: Iterable[Change]) -> list[Change]:
    """Order the changes: a parent comes before its blocks, and a chain stays together where it can."""
    by_digest: dict[bytes, list[Change]] = {}
    for change in changes:
        by_digest.setdefault(change[0].digest, []).append(change)
    ready: list[list[Change]] = []
    children: dict[bytes, list[list[Change]]] = {}
    for own in reversed(by_digest.values()):
        parent = own[0][0].parent
        if parent is not None and parent.digest in by_digest:
            children.setdefault(parent.digest, []).append(own)
        else:
            ready.append(own)
    ordered: list[Change] = []
    while ready:
        own = ready.pop()
        ordered += own
        ready += children.get(own[0][0].digest, ())
    return ordered
