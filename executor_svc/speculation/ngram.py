"""Drafts from the same text: what followed the last tokens where they were before."""

from __future__ import annotations

import numpy as np

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.limits import Limits
from executor_svc.speculation.drafts import Drafts, tokens_to_index
from executor_svc.speculation.ngram_table import NgramTable


class NgramSource:
    """Implements `DraftSource`: prompt lookup decoding (Saxena, 2023), in prompt and output.

    The longest match of a text's end counts, of max_match tokens at most, and of its places the most recent (vLLM's
    `ngram` takes the oldest). The drafts are the tokens that followed there; where they reach the end of the text, they
    go on with the first drafts, as a copy in LZ77 does, so that a text with a period is drafted to the full number.

    Costs: a step looks up the last tokens of each slot in a hash table and adds the new ones, O(max_match) a token. A
    step indexes a few tokens of every slot and max_indexed further ones in all; a longer prompt takes several steps,
    and meanwhile matches are found in its first part. A table that is full is made anew twice as large, in the same
    way. Memory: see `NgramTable`.
    """

    def __init__(self, limits: Limits, *, min_match: int = 2, max_match: int = 4, max_indexed: int = 8192) -> None:
        """min_match, max_match: length of a match in tokens. max_indexed: see above.

        Raises ValueError if the lengths are not in order.
        """
        if not 1 <= min_match <= max_match:
            raise ValueError(f"min_match {min_match} and max_match {max_match} must be 1 or more, in this order")
        self.min_match = min_match
        self.max_match = max_match
        self._max_indexed = max_indexed
        self._always = limits.max_drafts + 1
        self._max_tokens = limits.max_model_len + 1
        self._tables: list[NgramTable | None] = [None] * limits.num_slots
        self._admitted = np.zeros(limits.num_slots, np.bool_)

    @property
    def num_bytes(self) -> int:
        """The bytes of all tables."""
        return sum(table.num_bytes for table in self._tables if table is not None)

    def follow(self, plan: StepPlan) -> None:
        """As in `DraftSource`."""

    def admitted(self, slot: int, scope: int) -> None:
        """As in `DraftSource`; no sequence gets drafts from another's tokens."""
        self._tables[slot] = None
        self._admitted[slot] = True

    def released(self, slots: IntArray) -> None:
        """As in `DraftSource`."""
        self._admitted[slots] = False
        for slot in slots.tolist():
            self._tables[slot] = None

    def committed(self, slots: Slots, scheduled: Scheduled, starts: IntArray) -> None:
        """As in `DraftSource`."""

    def clear(self) -> None:
        """As in `DraftSource`."""
        self.released(np.arange(len(self._tables)))

    def looks(self, slots: Slots, rows: IntArray) -> bool:
        """As in `DraftSource`."""
        return True

    def propose(self, slots: Slots, rows: IntArray, most: IntArray) -> Drafts:
        """As in `DraftSource`; a slot whose admission was not reported gets no drafts."""
        counts = np.zeros(len(rows), np.int64)
        (known,) = self._admitted[rows].nonzero()
        rows, most = rows[known], most[known]
        num_tokens = slots.num_tokens[rows]
        tables = [self._table(slot, size) for slot, size in zip(rows.tolist(), num_tokens.tolist(), strict=True)]
        indexed = np.fromiter((table.num_indexed for table in tables), np.int64, len(tables))
        # The last token has no follower yet.
        waiting = np.maximum(num_tokens - 1 - indexed, 0)
        ends = indexed + tokens_to_index(waiting, self._always, self._max_indexed)
        width = slots.token_ids.shape[1]
        flat = slots.token_ids.reshape(-1).data
        drafts: list[int] = []
        ways = zip(
            known.tolist(), rows.tolist(), tables, ends.tolist(), num_tokens.tolist(), most.tolist(), strict=True
        )
        for i, slot, table, end, size, limit in ways:
            start = slot * width
            if end > table.num_indexed:
                table.add(slots.token_ids[slot], flat, start, end)
            if not limit or not size:
                continue
            length, index = table.find(flat, start, size - 1)
            if not length:
                continue
            period = size - 1 - index
            begin = start + index + 1
            drafts += [flat[begin + j % period] for j in range(limit)]
            counts[i] = limit
        return Drafts(counts, np.array(drafts, np.int64))

    def _table(self, slot: int, num_tokens: int) -> NgramTable:
        table = self._tables[slot]
        if table is None or num_tokens > table.capacity:
            table = NgramTable(self.min_match, self.max_match, num_tokens, self._max_tokens)
            self._tables[slot] = table
        return table
