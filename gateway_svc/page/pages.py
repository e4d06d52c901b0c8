"""What the pages of an executor's device pool hold where KV groups or states share it, from step records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from cadenza.info import ExecutorInfo
from cadenza.v1 import admin_pb2
from gateway_svc.page.blocks import CACHED, FREE

STATE, COPY, SNAPSHOT = -1, -2, -3
"""In place of a KV group: a sequence's state, a copy that is asked for, one that was made."""
_NAMES = {STATE: "state", COPY: "copy", SNAPSHOT: "snapshot"}


@dataclass(frozen=True, slots=True)
class PageLayout:
    """How an executor divides its pool."""

    block_size: int
    windows: tuple[int, ...]
    """By KV group, 0: none."""
    pages_per_block: tuple[int, ...]
    """By KV group."""
    pages_per_state: int

    @staticmethod
    def of(info: ExecutorInfo) -> PageLayout | None:
        """That of an executor; None: a block is a page, and there are no states."""
        if not info.kv_group_pages:
            return None
        return PageLayout(info.block_size, info.kv_group_windows, info.kv_group_pages, info.pages_per_state)


@dataclass(frozen=True, slots=True)
class _Page:
    """A page that is not free."""

    kind: int
    """A KV group, or STATE, COPY or SNAPSHOT."""
    position: int
    """Of KV the first token, of a state its place among the state's pages, of copies the number of tokens."""
    holders: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """In counts of pages."""
        return _NAMES.get(self.kind) or (str(self.kind) if self.holders else "cached")


@dataclass(slots=True)
class _Table:
    first_block: int
    pages: list[int]


class PageMap:
    """The pages of one executor's device pool.

    Records name the pages that a sequence gets, and those that became unused; between these a page that nobody holds is
    cached. Pages that were in use before the first record are not known until a sequence gets them.
    """

    def __init__(self, layout: PageLayout, drawn: Iterable[int] = ()) -> None:
        """drawn: pages that were not free when the executor divided its pool otherwise."""
        self.layout = layout
        self._tables: dict[int, dict[int, _Table]] = {}
        """By sequence id, then by KV group, or STATE."""
        self._pages: dict[int, _Page] = {}
        self._changed = set(drawn)
        self._counts = Counter[str]()
        self.num_held = 0
        """Pages that known sequences hold."""
        self.num_shared = 0
        """Of these, pages of several sequences."""

    @property
    def numbers(self) -> list[int]:
        """The pages that are not free."""
        return sorted(self._pages)

    @property
    def counts(self) -> dict[str, int]:
        """Pages by what they hold: the number of a KV group, `state`, `copy`, `snapshot`; `cached`: KV of nobody."""
        return +self._counts

    # --- records -----------------------------------------------------------------------------------------------------

    def add(self, change: admin_pb2.BlockTableChange) -> None:
        """Apply a change of a sequence's tables."""
        sequence_id, group = change.sequence_id, change.kv_group
        if change.cleared:
            self.release(sequence_id)
        if change.state_pages:
            self._append(sequence_id, STATE, 0, change.state_pages)
        if change.appended:
            self._append(sequence_id, group, change.first_block, change.appended)
        table = self._tables.get(sequence_id, {}).get(group)
        if table is not None and self.layout.windows[group]:
            self._give_back(sequence_id, table, self.layout.pages_per_block[group], change.first_block)

    def settle(self, record: admin_pb2.StepRecord) -> None:
        """Apply what has become of copies of states, and of pages that nobody needs, after all else of a record."""
        for copy in record.state_copies:
            for page in copy.page_ids:
                self._put(page, _Page(SNAPSHOT if copy.is_made else COPY, copy.position))
        for page in record.freed_pages:
            self._put(page, None)

    def release(self, sequence_id: int, num_tokens: int | None = None) -> None:
        """A sequence holds nothing any more. What nobody will find is freed by the next record."""
        for table in self._tables.pop(sequence_id, {}).values():
            self._leave(sequence_id, table.pages)

    def keep_only(self, sequence_ids: Iterable[int]) -> None:
        """Release all other sequences."""
        for sequence_id in set(self._tables).difference(sequence_ids):
            self.release(sequence_id)

    def clear(self) -> None:
        """The pool is empty, as that of a new process."""
        for number in list(self._pages):
            self._put(number, None)
        self._tables.clear()

    def _append(self, sequence_id: int, kind: int, first_block: int, pages: Iterable[int]) -> None:
        table = self._tables.setdefault(sequence_id, {}).setdefault(kind, _Table(first_block, []))
        for page in pages:
            place, known = len(table.pages), self._pages.get(page)
            position = place if kind == STATE else self._position(kind, table.first_block, place)
            is_same = known is not None and (known.kind, known.position) == (kind, position)
            others = known.holders if known is not None and is_same else ()  # else it was taken from them
            if sequence_id not in others:
                self._put(page, _Page(kind, position, (*others, sequence_id)))
            table.pages.append(page)

    def _position(self, group: int, first_block: int, place: int) -> int:
        return (first_block + place // self.layout.pages_per_block[group]) * self.layout.block_size

    def _give_back(self, sequence_id: int, table: _Table, pages_per_block: int, first_block: int) -> None:
        """A sequence holds no blocks of a window before this one."""
        if first_block > table.first_block:
            count = (first_block - table.first_block) * pages_per_block
            self._leave(sequence_id, table.pages[:count])
            table.pages, table.first_block = table.pages[count:], first_block

    def _leave(self, sequence_id: int, pages: list[int]) -> None:
        for number in pages:
            page = self._pages.get(number)
            if page is None or sequence_id not in page.holders:
                continue
            others = tuple(holder for holder in page.holders if holder != sequence_id)
            self._put(number, None if page.kind == STATE else _Page(page.kind, page.position, others))

    def _put(self, number: int, page: _Page | None) -> None:
        before = self._pages.pop(number, None)
        if page is not None:
            self._pages[number] = page
        for each, sign in ((before, -1), (page, 1)):
            if each is not None:
                self._counts[each.name] += sign
                self.num_held += sign * bool(each.holders)
                self.num_shared += sign * (len(each.holders) > 1)
        self._changed.add(number)

    # --- frames ------------------------------------------------------------------------------------------------------

    def take_changes(self) -> list[int]:
        """What has changed since the last call: of each page its number, holder, number of holders, kind, position."""
        changed, self._changed = sorted(self._changed), set()
        return self._states(changed)

    def states(self) -> list[int]:
        """The same of all pages that are not free."""
        return self._states(self.numbers)

    def _states(self, numbers: Iterable[int]) -> list[int]:
        states: list[int] = []
        for number in numbers:
            page = self._pages.get(number)
            if page is None:
                states += (number, FREE, 0, 0, 0)
            else:
                holder = page.holders[0] if page.holders else CACHED
                states += (number, holder, len(page.holders), page.kind, page.position)
        return states
