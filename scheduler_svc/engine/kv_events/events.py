"""Events and batches of them, as subscribers get them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from scheduler_svc.engine.kv_events.blocks import Block, Tier

MAX_BATCH_BLOCKS = 1024
"""Blocks in one batch: with 16 tokens in each, some 100 KB in a message."""


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
class Batch:
    """Events of one moment."""

    number: int
    time_ns: int
    """Nanoseconds since 1970."""
    events: Sequence[Event]
    part: StatePart | None = None
    """Of the present state; None: the batch is what changed."""


def grouped(changes: Iterable[Change]) -> Iterator[list[Event]]:
    """The changes as events, in their order, in lists of at most MAX_BATCH_BLOCKS blocks."""
    events: list[Event] = []
    run: list[Block] = []
    kind: tuple[Tier, bool] | None = None
    num_blocks = 0

    def end_run() -> None:
        if kind is not None and run:
            tier, is_stored = kind
            events.append(Stored(tuple(run), tier) if is_stored else Removed(tuple(run), tier))
            run.clear()

    for block, tier, is_stored in changes:
        follows = kind == (tier, is_stored) and (not is_stored or (bool(run) and block.parent is run[-1]))
        if num_blocks == MAX_BATCH_BLOCKS or not follows:
            end_run()
        if num_blocks == MAX_BATCH_BLOCKS:
            yield events
            events, num_blocks = [], 0
        kind = tier, is_stored
        run.append(block)
        num_blocks += 1
    end_run()
    if events:
        yield events


def net(changes: Sequence[Change]) -> list[Change]:
    """The changes without blocks that came and went, or went and came: those of a lost step were never certain."""
    first: dict[tuple[bytes, str], bool] = {}
    begun: dict[tuple[bytes, str], int] = {}
    last: dict[tuple[bytes, str], int] = {}
    for index, (block, tier, is_stored) in enumerate(changes):
        name = block.digest, tier.value
        first.setdefault(name, is_stored)
        begun.setdefault(name, index)
        last[name] = index
    # A block is stored where it first came, so before its children; it is removed where it went for good.
    return [
        change
        for index, change in enumerate(changes)
        for name in [(change[0].digest, change[1].value)]
        if first[name] == changes[last[name]][2] and index == (begun[name] if first[name] else last[name])
    ]
