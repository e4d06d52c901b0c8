"""The most recent place of every n-gram of one text, in a hash table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from executor_svc.plan.arrays import IntArray

# More n-grams than this are added with numpy, fewer one by one: numpy's calls cost more than a few n-grams.
_FEW = 24
# An n-gram is at one of so many places of a table; with all taken, which a table half full hardly has, it takes the
# last: an n-gram is lost, and no step is slow, whatever the token ids are.
_MAX_PROBES = 128
_SMALLEST = 512
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class NgramTable:
    """Maps the n-grams of min_match to max_match tokens to the index of their last token.

    There is an open-addressed table for each n; an entry has the top bits of the n-gram's hash and the index. With
    about 45 bits of hash two n-grams are hardly ever taken for one, and `find` compares the tokens. Memory: 16 to 32
    bytes a token for each n.
    """

    def __init__(self, min_match: int, max_match: int, num_tokens: int, max_tokens: int) -> None:
        """num_tokens: of the text so far, which takes a table with room to grow; max_tokens: the most it can have."""
        self._min_match = min_match
        self._max_match = max_match
        size = max(_SMALLEST, 1 << (2 * num_tokens + num_tokens // 4).bit_length())
        self.capacity = size // 2
        """The number of tokens that the table is made for."""
        self.num_indexed = 0
        """The table has the n-grams of so many first tokens: each n-gram that ends among them."""
        # Entries: the top bits of the n-gram's hash, and the index of its last token + 1; 0: free.
        self._table = np.zeros((max_match - min_match + 1) * size, np.int64)
        self._view = self._table.data
        self._size = size
        self._index_bits = max_tokens.bit_length()
        self._mark_shift = 1 + self._index_bits
        self._place_shift = 65 - size.bit_length()

    @property
    def num_bytes(self) -> int:
        """The bytes of the table."""
        return self._table.nbytes

    def add(self, token_ids: NDArray[np.int32], flat: memoryview[int], start: int, num_tokens: int) -> None:
        """Index a text's next tokens, up to num_tokens.

        token_ids: [num_tokens or more] the text; flat: the same int32 values, the text from `start` on.
        """
        if num_tokens - self.num_indexed > _FEW:
            self._add_many(token_ids, self.num_indexed, num_tokens)
        else:
            for last in range(self.num_indexed, num_tokens):
                self._add_one(flat, start, last)
        self.num_indexed = num_tokens

    def find(self, flat: memoryview[int], start: int, last: int) -> tuple[int, int]:
        """Return (length, index of the last token) of the longest indexed n-gram that ends the text at `last`.

        Of its places the most recent; (0, 0) if there is none. flat, start: as in `add`.
        """
        length, index = 0, 0
        mixed, base = 0, -self._size
        for n in range(1, min(self._max_match, last + 1) + 1):
            mixed = ((mixed ^ (flat[start + last - n + 1] + 1)) * _MULTIPLIER) & _MASK
            if n < self._min_match:
                continue
            base += self._size
            place = self._place(base, mixed)
            entry = self._view[place]
            if not entry or entry >> self._index_bits != mixed >> self._mark_shift:
                break
            found = (entry & ((1 << self._index_bits) - 1)) - 1
            if any(flat[start + found - i] != flat[start + last - i] for i in range(n)):
                break
            length, index = n, found
        return length, index

    def _place(self, base: int, mixed: int) -> int:
        """Return the place of an n-gram: its entry's, else the first free one, else the last that it may have."""
        view, bits, mask = self._view, self._index_bits, self._size - 1
        mark = mixed >> self._mark_shift
        place = mixed >> self._place_shift
        entry = view[base + place]
        for _ in range(_MAX_PROBES - 1):
            if not entry or entry >> bits == mark:
                break
            place = (place + 1) & mask
            entry = view[base + place]
        return base + place

    def _add_one(self, flat: memoryview[int], start: int, last: int) -> None:
        mixed, base = 0, -self._size
        for n in range(1, min(self._max_match, last + 1) + 1):
            mixed = ((mixed ^ (flat[start + last - n + 1] + 1)) * _MULTIPLIER) & _MASK
            if n >= self._min_match:
                base += self._size
                self._view[self._place(base, mixed)] = mixed >> self._mark_shift << self._index_bits | last + 1

    def _add_many(self, token_ids: NDArray[np.int32], start: int, stop: int) -> None:
        first = max(start - self._max_match + 1, 0)
        values = token_ids[first:stop].astype(np.uint64) + np.uint64(1)
        mixed = np.zeros(stop - start, np.uint64)
        lasts = np.arange(start, stop)
        for n in range(1, self._max_match + 1):
            # The first tokens of a text end no n-gram.
            skipped = max(n - 1 - int(lasts[0]), 0) if len(lasts) else 0
            mixed, lasts = mixed[skipped:], lasts[skipped:]
            if not len(lasts):
                return
            begin = int(lasts[0]) - n + 1 - first
            mixed = (mixed ^ values[begin : begin + len(lasts)]) * np.uint64(_MULTIPLIER)
            if n >= self._min_match:
                base = (n - self._min_match) * self._size
                self._put_many(self._table[base : base + self._size], mixed, lasts)

    def _put_many(self, table: IntArray, mixed: NDArray[np.uint64], lasts: IntArray) -> None:
        """Put n-grams into a table; lasts: ascending, so that of equal places the most recent stays."""
        marks = (mixed >> np.uint64(self._mark_shift)).astype(np.int64)
        places = (mixed >> np.uint64(self._place_shift)).astype(np.int64)
        entries = marks << self._index_bits | lasts + 1
        for _ in range(_MAX_PROBES - 1):
            held = table[places]
            mine = (held == 0) | (held >> self._index_bits == marks)
            # Of several values for one place numpy keeps the last.
            table[places[mine]] = entries[mine]
            left = table[places] >> self._index_bits != marks
            if not left.any():
                return
            marks, entries = marks[left], entries[left]
            places = (places[left] + 1) & (self._size - 1)
        table[places] = entries
