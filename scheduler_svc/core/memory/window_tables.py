"""Which blocks of a sequence's table are in its window, by window group: the pages that it holds there.

`Sequence.windows` has a range of block indexes for each window group. It begins where the next row's window begins, and
some positions before; it ends where the next chunk ends, or later. What lies before it is given back when a step is
planned, and what is given back may be taken at once for the blocks behind it. So a sequence with pages for one chunk
has pages for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ids

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.kv_groups import GroupSizes, KVGroup
from scheduler_svc.core.memory.paged_pool import PagedPool
from scheduler_svc.core.memory.paged_tiers import PagedTiers
from scheduler_svc.core.memory.prefix_cache import host_place
from scheduler_svc.core.sequences.sequence import Sequence


class WindowTables:
    """The windows of all sequences with blocks in either pool. All sizes in blocks unless stated."""

    def __init__(self, tiers: PagedTiers, sizes: GroupSizes) -> None:
        self._tiers = tiers
        self._sizes = sizes
        self.num_groups = len(sizes.windows)
        self._interval = sizes.interval

    def _groups(self) -> Iterator[tuple[int, int, KVGroup]]:
        """Number among the window groups, window, and the group."""
        return ((number, group.window or 0, group) for number, group in enumerate(self._sizes.windows))

    def open(self, sequence: Sequence, first: int, chunk: int) -> None:
        """Take pages for the first chunk of a sequence with a new table, from block `first` on."""
        num_blocks = len(sequence.block_ids)
        windows = []
        for number, window, _ in self._groups():
            end = min(num_blocks, first + self._sizes.quota(window, chunk))
            windows.append(range(first, max(first, end)))
            self._hold(self._tiers.device, number, sequence.block_ids[first:end])
        sequence.windows = windows

    def claim(self, places: Ids[int]) -> list[tuple[PagedPool, int, int]]:
        """Hold what the row after these cached blocks reads, so that nothing of it is evicted; for `end_claim`."""
        claimed = []
        for number, window, _ in self._groups():
            for place in places[max(0, len(places) - self._sizes.num_read(window)) :]:
                pool, block_id = (self._tiers.device, place) if place >= 0 else (self._tiers.host, host_place(place))
                pool.hold_window(number, block_id)
                claimed.append((pool, number, block_id))
        return claimed

    def end_claim(self, claimed: list[tuple[PagedPool, int, int]]) -> None:
        """Leave what was claimed: a sequence holds it now, or the plan being made."""
        for pool, number, block_id in claimed:
            pool.leave_window(number, block_id)

    def open_found(self, sequence: Sequence, num_found: int, chunk: int) -> None:
        """As `open`, behind the first blocks of its table, which are cached: it holds what its next row reads there."""
        sequence.windows = []
        for number, window, _ in self._groups():
            held = self._sizes.opening(window, num_found, len(sequence.block_ids), chunk)
            self._hold(self._tiers.device, number, sequence.block_ids[held.start : held.stop])
            sequence.windows.append(held)

    def num_to_open(self, places: Ids[int], num_blocks: int, chunk: int) -> int:
        """Number of free pages that `open_found` takes for a table of so many blocks, the first of which are cached."""
        num_pages, num_found = 0, len(places)
        for number, window, group in self._groups():
            held = self._sizes.opening(window, num_found, num_blocks, chunk)
            num_held = sum(place in self._tiers.device.window_refs[number] for place in places[held.start :])
            num_pages += group.pages_per_block * (len(held) - num_held)
        return num_pages

    def give_back(self, sequence: Sequence) -> list[int]:
        """Give back what lies before the window of its next row; returns the freed blocks by window group.

        Cached blocks keep their pages while there is room, and longer where a prefix has been seen to end.
        """
        num_freed = []
        for number, window, _ in self._groups():
            held, table = sequence.windows[number], sequence.block_ids
            first = min(max(held.start, self._sizes.first_block(window, sequence.num_computed_tokens)), held.stop)
            num_freed.append(
                sum(
                    self._tiers.device.leave_window(
                        number, table[index], is_spare=not self._ends_behind(sequence, index, window)
                    )
                    for index in range(held.start, first)
                )
            )
            sequence.windows[number] = range(first, held.stop)
        return num_freed

    def _ends_behind(self, sequence: Sequence, index: int, window: int) -> bool:
        """Whether the window of a likely hit has this block: behind the prompt, where prefixes have ended, and after
        every interval."""
        num_read, interval = self._sizes.num_read(window), self._interval
        if interval - 1 - index % interval < num_read:
            return True
        prompt_end = (sequence.num_prompt_tokens - 1) // self._sizes.block_size
        return any(end - num_read <= index < end for end in (prompt_end, *sequence.prefix_ends))

    def cover(self, sequence: Sequence, num_tokens: int) -> int:
        """Give back, and take pages for its next tokens; returns for how many there are now, at most `num_tokens`."""
        num_freed, device = self.give_back(sequence), self._tiers.device
        needed = -(-(sequence.num_computed_tokens + num_tokens) // self._sizes.block_size)
        reached = needed
        for number, _, group in self._groups():
            held, table = sequence.windows[number], sequence.block_ids
            wanted = min(len(table), max(needed, held.stop + num_freed[number]))
            end = held.stop
            while end < wanted:
                is_there = table[end] in device.windows[number]
                if not is_there and device.num_free < group.pages_per_block:
                    break
                self._tiers.hold_window(device, number, table[end])
                end += 1
            sequence.windows[number] = range(held.start, end)
            reached = min(reached, end)
        return max(0, min(num_tokens, reached * self._sizes.block_size - sequence.num_computed_tokens))

    def num_lacking(self, sequence: Sequence) -> int:
        """Number of pages that its next token lacks, and the last one behind it, once it has given back what it can."""
        self.give_back(sequence)
        is_last_but_one = sequence.num_uncomputed_tokens == 2
        index, num_pages = (sequence.num_computed_tokens + is_last_but_one) // self._sizes.block_size, 0
        for number, _, group in self._groups():
            lacking = sequence.block_ids[sequence.windows[number].stop : index + 1]
            num_pages += group.pages_per_block * sum(
                block_id not in self._tiers.device.windows[number] for block_id in lacking
            )
        return num_pages

    def extend(self, sequence: Sequence, num_before: int) -> None:
        """Take pages for the blocks by which its table has grown, if it had them for all before, as decodes do."""
        for number, _, _ in self._groups():
            held = sequence.windows[number]
            if held.stop < num_before:
                continue
            self._hold(self._tiers.device, number, sequence.block_ids[held.stop :])
            sequence.windows[number] = range(held.start, len(sequence.block_ids))

    def share(self, source: Sequence, child: Sequence) -> None:
        """Let a child with the first blocks of `source` hold what `source` holds of them."""
        num_blocks, windows = len(child.block_ids), []
        for number in range(self.num_groups):
            held = source.windows[number]
            windows.append(range(min(held.start, num_blocks), min(held.stop, num_blocks)))
            self._hold(self._tiers.device, number, child.block_ids[windows[-1].start : windows[-1].stop])
        child.windows = windows

    def join(self, source: Sequence, child: Sequence) -> None:
        """Let a child, whose own blocks follow those that it shares with `source`, hold what precedes its next row.

        What it holds of its own behind a gap it gives back.
        """
        device = self._tiers.device
        for number, window, _ in self._groups():
            own, theirs, table = child.windows[number], source.windows[number], child.block_ids
            first = max(theirs.start, self._sizes.first_block(window, child.num_computed_tokens))
            end = min(theirs.stop, own.start if own else len(table))
            end = min(end, _num_common(source, child, end))
            joined = range(min(first, end), end)
            self._hold(device, number, table[joined.start : joined.stop])
            if own and joined.stop == own.start:
                joined = range(joined.start, own.stop)
            else:
                self._leave(device, number, table[own.start : own.stop])
            child.windows[number] = joined

    def replace(self, sequence: Sequence, index: int, block_id: int) -> None:
        """Its block at this index is about to be replaced by a copy."""
        device = self._tiers.device
        for number, held in enumerate(sequence.windows):
            if index in held:
                self._tiers.hold_window(device, number, block_id)
                device.leave_window(number, sequence.block_ids[index])

    def hold_all(self, sequence: Sequence, pool: PagedPool, block_ids: list[int]) -> None:
        """Take pages for its windows in a table to which its blocks move."""
        for number, held in enumerate(sequence.windows):
            self._hold(pool, number, block_ids[held.start : held.stop])

    def drop(self, sequence: Sequence) -> None:
        """Give back all that it holds."""
        is_out = bool(sequence.host_block_ids)
        self.leave_all(sequence, self._tiers.host if is_out else self._tiers.device)
        sequence.windows = []

    def leave_all(self, sequence: Sequence, pool: PagedPool) -> None:
        """Give back what it holds in a pool that it leaves."""
        table = sequence.host_block_ids if pool is self._tiers.host else sequence.block_ids
        for number, held in enumerate(sequence.windows):
            self._leave(pool, number, table[held.start : held.stop])

    def covers(self, sequence: Sequence) -> bool:
        """Whether it holds all that its next row reads."""
        size, context_len = self._sizes.block_size, sequence.num_computed_tokens
        return all(
            held.start * size <= max(0, context_len - window + 1) and held.stop * size >= context_len
            for held, (_, window, _) in zip(sequence.windows, self._groups(), strict=True)
        )

    def _hold(self, pool: PagedPool, number: int, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._tiers.hold_window(pool, number, block_id)

    def _leave(self, pool: PagedPool, number: int, block_ids: Iterable[int]) -> int:
        return sum(pool.leave_window(number, block_id) for block_id in block_ids)

    def check_integrity(self, holders: list[Sequence]) -> None:
        """Check the windows of all sequences with blocks."""
        counts: dict[int, list[Counter[int]]] = {}
        for pool in (self._tiers.device, self._tiers.host):
            counts[id(pool)] = [Counter() for _ in range(self.num_groups)]
        for pool, number, block_id in self._tiers.kept:
            counts[id(pool)][number][block_id] += 1
        for sequence in holders:
            pool = self._tiers.host if sequence.host_block_ids else self._tiers.device
            table = sequence.host_block_ids or sequence.block_ids
            if sequence.may_compute and not self.covers(sequence):
                raise InvariantError(f"sequence {sequence.sequence_id} lacks KV that its next row reads in a window")
            for held, (number, window, group) in zip(sequence.windows, self._groups(), strict=False):
                most = self._sizes.quota(window, self._sizes.most_ahead)
                if len(sequence.group.sequences) > 1:
                    # A sample that comes back has a quota behind the blocks that it shares.
                    most += self._sizes.num_kept(window) // self._sizes.block_size + 1
                if held.stop > len(table) or len(held) > most:
                    raise InvariantError(
                        f"sequence {sequence.sequence_id} holds {held} of {len(table)} blocks in KV group {group.index}"
                    )
                counts[id(pool)][number].update(table[held.start : held.stop])
        for pool in (self._tiers.device, self._tiers.host):
            if [dict(each) for each in counts[id(pool)]] != pool.window_refs[: self.num_groups]:
                raise InvariantError("the holders of blocks in windows are miscounted")


def _num_common(left: Sequence, right: Sequence, most: int) -> int:
    """Number of the first blocks, up to `most`, that two tables have in common."""
    for index in range(min(most, len(left.block_ids), len(right.block_ids))):
        if left.block_ids[index] != right.block_ids[index]:
            return index
    return min(most, len(left.block_ids), len(right.block_ids))
