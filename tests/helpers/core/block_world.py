"""The block manager in a small world, beside a model that knows what every block holds.

The model keeps the KV of both pools: for each position of each block, all tokens up to there of who wrote it, with
tenant, salt and adapter's content, in each KV group. It carries out the moves of each plan in the executor's order, and
leaves garbage in pages that nobody has. Whatever is requested in whatever order, each table must read its own
sequence's tokens, in a window those of the window.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.kv_groups import KVGroup
from scheduler_svc.core.memory.prefix_cache import NO_PREFIX
from scheduler_svc.core.types import RequestSpec
from tests.helpers.core.block_books import MAX_CHUNK, BlockBooks, Group, Row

# The ids x and x + 2**31 differ in one bit: half of these prompts look like the other half.
ALIKE = 2**31
PROMPTS = [[1] * 9, [1, 1, 1] + [1 + ALIKE] * 6, [1 + ALIKE] * 9]
TOKENS = [1, 1, 1 + ALIKE]
FULL, SMALL, LARGE = KVGroup(0), KVGroup(1, 2), KVGroup(1, 5, 3)
GROUPS = [
    (),
    (FULL, SMALL),
    (FULL, LARGE),
    (replace(FULL, pages_per_block=2), LARGE, replace(SMALL, index=2)),
    (replace(FULL, pages_per_block=3),),
    (KVGroup(0, 4, 2),),
    (KVGroup(0, 1),),
]
"""The KV groups of executors; none: a block is a page."""


class World(BlockBooks):
    """What may happen, in whatever order."""

    # ------------------------------------------------------------- arrivals

    def arrive(
        self,
        prompt: list[int],
        num_tokens: int,
        scope: tuple[str, bytes, bytes],
        option: str,
        num_reserved: int,
        makes_way: str,
    ) -> None:
        tenant, salt, adapter_hash = scope
        spec = RequestSpec(
            "r",
            tuple(prompt[:num_tokens]),
            SequenceSampling(num_prompt_logprobs=1 if option == "logprobs" else None),
            tenant=tenant,
            cache_salt=salt,
            uses_prefix_cache=option != "opted out",
        )
        token_ids = prompt[:num_tokens]
        if option == "again" and self.ended:
            # A conversation goes on.
            old = self.ended[num_tokens % len(self.ended)]
            spec, token_ids = old.group.spec, [*old.token_ids, num_tokens]
            adapter_hash = old.group.adapter_hash
        row = self._make_row(Group(spec, adapter_hash), token_ids)
        self.waiting = [*self.waiting[-3:], row]
        # As in a scheduler, running sequences are preempted: most of the time the pool is full.
        num_blocks = self.blocks.num_blocks_for(len(token_ids))
        while makes_way and self.running and self.blocks.num_free < self.blocks.num_pages_for(num_blocks):
            if makes_way != "swap out" or not self._swap_out(len(self.running) - 1, 1):
                self._leave(len(self.running) - 1, makes_way)
        self._admit(row, num_reserved)

    def _make_row(self, group: Group, token_ids: list[int]) -> Row:
        self.num_made += 1
        lacks = group.spec.sampling.num_prompt_logprobs is not None and len(token_ids) > 1
        row = Row(self.num_made, group, token_ids, list(token_ids), needs_prompt_logprobs=lacks)
        group.sequences.append(row)
        return row

    def _admit(self, row: Row, num_reserved: int) -> None:
        found = self.blocks.find_cached_prefix(row)
        spec = row.group.spec
        if not self.caching or not spec.uses_prefix_cache or row.needs_prompt_logprobs:
            assert found is NO_PREFIX
        assert found.num_tokens == found.num_blocks * self.size <= len(row.token_ids) - 1
        num_tokens = len(row.token_ids) + (0 if self.blocks.windows is not None else num_reserved)
        num_to_take = self.blocks.num_to_take(found, self.blocks.num_blocks_for(num_tokens))
        if not self.blocks.can_take(num_to_take, alone=True):
            return
        num_free = self.blocks.num_free
        self.blocks.allocate(row, num_tokens, found=found)
        assert self.blocks.num_free == num_free - num_to_take
        assert len(row.block_ids) == self.blocks.num_blocks_for(num_tokens)
        self.just_in |= found.num_host > 0
        self.num_queries += found.num_queried
        self.num_hits += found.num_tokens
        row.num_computed_tokens = row.num_written = found.num_tokens
        self.waiting.remove(row)
        self.running.append(row)

    def change(self, op: str, pick: int, num_rows: int, token_id: int) -> None:
        """One of the other things that happen between two steps."""
        if op == "admit":
            if self.waiting:
                self._admit(self.waiting[pick % len(self.waiting)], 0)
        elif op == "fork":
            self._fork(pick, token_id)
        elif op == "admit beside":
            self._admit_beside(pick, token_id)
        elif op == "write":
            self._write(pick)
        elif op == "swap out":
            self._swap_out(pick, num_rows)
        elif op == "swap in":
            self._swap_in(pick, num_rows)
        else:
            self._leave(pick, op)

    # ------------------------------------------------------------- sharing

    def _fork(self, pick: int, token_id: int) -> None:
        sources = [row for row in self.running if row.num_written]
        if not sources:
            return
        source = sources[pick % len(sources)]
        num_shared = max(1, min(source.num_written, len(source.token_ids)) - pick % 3)
        child = self._make_row(source.group, [*source.token_ids[:num_shared], token_id])
        if not self._covers(source, num_shared):
            return
        num_free, states = self.blocks.num_free, self.blocks.states
        if states is not None:
            if num_shared != source.num_computed_tokens or num_free < states.num_pages:
                return  # Its state stands elsewhere.
            num_free -= states.num_pages
        self.blocks.share_blocks(source, child, num_shared)
        if states is not None:
            states.copy(source, child)
        assert self.blocks.num_free == num_free
        assert child.block_ids == source.block_ids[: self.blocks.num_blocks_for(num_shared)]
        child.num_computed_tokens = child.num_written = num_shared
        self.running.append(child)
        if pick % 2:
            self._write(pick)

    def _write(self, pick: int) -> None:
        """Copy-on-write early in a plan: what was copied may be shared again, swapped or freed in the same plan."""
        sharing = [row for row in self.running if self.blocks.writes_shared(row)]
        if sharing and self.blocks.num_free >= self.blocks.block_pages:
            self.blocks.make_writable(sharing[pick % len(sharing)])

    def _admit_beside(self, pick: int, token_id: int) -> None:
        """As a fork, but of whole blocks, and with room for its own tokens."""
        sources = [row for row in self.running if min(row.num_written, len(row.token_ids)) >= self.size]
        if self.blocks.states is not None:
            return  # Nobody goes on behind blocks without a state.
        if not sources or self.blocks.num_free < self.blocks.block_pages:
            return
        source = sources[pick % len(sources)]
        num_blocks = min(source.num_written, len(source.token_ids)) // self.size
        if not self._covers(source, num_blocks * self.size):
            return
        child = self._make_row(source.group, [*source.token_ids[: num_blocks * self.size], token_id])
        self.blocks.allocate(child, len(child.token_ids), source=source, num_shared=num_blocks)
        child.num_computed_tokens = child.num_written = num_blocks * self.size
        if self.blocks.windows is not None:
            self.blocks.windows.join(source, child)
        self.running.append(child)

    def _covers(self, source: Row, num_tokens: int) -> bool:
        """Whether a row holds all that one behind its first tokens reads in windows."""
        windows = self.sizes.windows if self.sizes is not None else ()
        return all(
            held.start * self.size <= max(0, num_tokens - (group.window or 0) + 1)
            and num_tokens <= held.stop * self.size
            for held, group in zip(source.windows, windows, strict=True)
        )

    # ------------------------------------------------------------- departures

    def _leave(self, pick: int, how: str) -> None:
        rows = self.swapped if self.swapped and (how == "end swapped" or not self.running) else self.running
        if not rows:
            return
        row = rows.pop(pick % len(rows))
        self.blocks.free(row, invalid_kv=how == "spoil")
        self.release(row)
        assert (row.block_ids, row.host_block_ids, row.num_cached_blocks, row.cache_node) == ([], [], 0, None)
        self.blocks.free(row)
        row.num_computed_tokens = row.num_written = 0
        row.token_ids = list(row.known)
        if how == "preempt" and not row.stopped:
            self.waiting.append(row)
        elif how == "end":
            self.ended = [row, *self.ended[:3]]

    def _swap_out(self, pick: int, num_rows: int) -> bool:
        if not self.running:
            return False
        first = pick % len(self.running)
        rows = self.running[first : first + num_rows]
        tables = [list(row.block_ids) for row in rows]
        num_distinct = self._num_pages(rows)
        held_by_others = any(row.windows for row in self.running if row not in rows)
        assert self.blocks.num_to_swap(rows) >= num_distinct
        assert held_by_others or self.blocks.num_to_swap(rows) == num_distinct
        num_free = self.blocks.host_pool.num_free
        if not self.blocks.swap_out(rows):
            assert held_by_others or num_distinct > num_free or self.just_in
            assert tables == [row.block_ids for row in rows]
            return False
        for row in rows:
            self.release(row)
        assert [len(row.host_block_ids) for row in rows] == [len(table) for table in tables]
        assert not any(row.block_ids for row in rows)
        assert self.blocks.host_pool.num_free == num_free - num_distinct
        del self.running[first : first + num_rows]
        self.swapped += rows
        self.just_out.update(rows)
        return True

    def _swap_in(self, pick: int, num_rows: int) -> None:
        if not self.swapped:
            return
        first = pick % len(self.swapped)
        rows = [row for row in self.swapped[first : first + num_rows] if row not in self.just_out]
        num_to_take = self.blocks.num_to_swap_in(rows)
        if not rows or not self.blocks.can_take(num_to_take, alone=True):
            return
        num_free = self.blocks.num_free
        self.blocks.swap_in(rows)
        assert self.blocks.num_free == num_free - num_to_take
        self.just_in = True
        self.swapped = [row for row in self.swapped if row not in rows]
        self.running += rows

    # ------------------------------------------------------------- steps and results

    def step(self, wanted: list[int], sampled: list[int], confirmed: list[bool]) -> None:
        """A plan is complete and runs. Of some sequences the results are in at once."""
        wants, samples, confirms = cycle(wanted), cycle(sampled), cycle(confirmed)
        chunks = [(row, self._make_room(row, next(wants))) for row in self.running]
        for row, num_tokens in chunks:
            self.arm(row, num_tokens)
        self._move()
        for row, num_tokens in chunks:
            context_len = row.num_computed_tokens
            self._compute(row, num_tokens, next(samples))
            self.compute_state(row, min(context_len, row.num_written))
        self.end_step(is_told=confirmed[0])
        self.just_out.clear()
        self.just_in = False
        self._check_counts()
        self._check_contents()
        for row in list(self.running):
            if next(confirms):
                row.token_ids = list(row.known)
                self.blocks.cache_full_blocks(row, computed_again=True)
                if row.stopped or len(row.known) > 12:
                    self._leave(self.running.index(row), "end")

    def _make_room(self, row: Row, num_wanted: int) -> int:
        blocks = self.blocks
        blocks.give_back(row)
        num_tokens = min(num_wanted, len(row.known) - row.num_computed_tokens, MAX_CHUNK)
        if num_tokens <= 0:
            return 0
        while blocks.num_blocks_for(row.num_computed_tokens + num_tokens) > len(row.block_ids):
            if blocks.num_free < blocks.block_pages:
                break
            blocks.extend(row, 1)
        if blocks.windows is not None:
            num_tokens = blocks.windows.cover(row, num_tokens)
        if num_tokens and blocks.writes_shared(row):
            if blocks.num_free < blocks.block_pages:
                return 0
            block_id = blocks.make_writable(row)
            assert block_id == row.block_ids[row.num_computed_tokens // self.size]
            assert not blocks.writes_shared(row)
        return min(num_tokens, len(row.block_ids) * self.size - row.num_computed_tokens)

    def _move(self) -> None:
        """The moves of the plan as an executor carries them out, which allows none that depends on their order."""
        moves = self.blocks.take_moves()
        if self.sizes is not None and moves.pages is not None:
            moves = moves.pages
        for pairs in (moves.swapped_out, moves.copied, moves.swapped_in):
            destinations = [destination for _, destination in pairs]
            assert len(set(destinations)) == len(destinations)
        assert not {source for source, _ in moves.copied} & {destination for _, destination in moves.copied}
        assert not {destination for _, destination in moves.swapped_out} & {source for source, _ in moves.swapped_in}
        for source_pool, target_pool, pairs in (
            (self.device, self.host, moves.swapped_out),
            (self.device, self.device, moves.copied),
            (self.host, self.device, moves.swapped_in),
        ):
            contents = [list(source_pool[source]) for source, _ in pairs]
            for content, (_, destination) in zip(contents, pairs, strict=True):
                target_pool[destination] = content

    def _compute(self, row: Row, num_tokens: int, sampled: int) -> None:
        for _ in range(num_tokens):
            position = row.num_computed_tokens
            row.num_computed_tokens += 1
            # The executor knows of a stop before the scheduler does, and computes no more.
            if row.stopped and position == len(row.known) - 1:
                return
            for name, pages in self._pages(row, position // self.size, self.blocks.pool):
                assert pages, "a row writes where it has no pages"
                for strip, page in enumerate(pages):
                    self.device[page][position % self.size] = (name, strip, row.kv(position))
            row.num_written += 1
        if num_tokens and row.num_computed_tokens == len(row.known):
            row.known.append(sampled)
