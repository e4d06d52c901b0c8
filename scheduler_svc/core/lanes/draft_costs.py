"""Measured time of decode steps, by batch size and number of drafts."""

from __future__ import annotations

_DECAY = 31 / 32
"""Weight of earlier steps after each new one of the same cell."""
_FADE = 0.99
"""Weight that a cell keeps for each result that was not one of its own."""
_LEAST = 4.0
"""Steps' weight that an old cell keeps: it stays the estimate, but a few new steps outweigh it."""
_MEASURED = 1.9
"""Weight from which a cell counts as measured: two steps."""
_OUTLIER = 1.5
"""A step that takes so many times the mean is an outlier."""
_MOST_OUTLIERS = 3
"""Outliers in a row that are cut; after them, steps really take that long."""
_ELASTICITY = 0.5
"""Share by which a step's time is taken to grow with its batch within a bucket: between 0 (bound by bandwidth) and 1
(bound by compute)."""
_NEAR = 2
"""Buckets, each way, whose steps without drafts are compared with a bucket's steps with drafts, if it has none."""
_REACH = 8
"""Buckets, each way, from which a bucket takes what it has not measured itself: two octaves."""


def bucket_of(num_decodes: int) -> int:
    """The batch-size bucket: one per size up to 8, then four per octave."""
    if num_decodes < 8:
        return num_decodes
    octave = num_decodes.bit_length() - 1
    return 8 + 4 * (octave - 3) + ((num_decodes >> (octave - 2)) & 3)


class _Cell:
    """Decayed means of the steps of one bucket with one number of drafts."""

    __slots__ = ("_outliers", "_seen_at", "decodes", "drafts", "ns", "weight")

    def __init__(self) -> None:
        self.weight = self.decodes = self.drafts = self.ns = 0.0
        self._outliers = self._seen_at = 0

    def add(self, num_decodes: int, num_drafts: int, ns: float, now: int) -> None:
        weight = self.weight
        if weight:
            mean = self.ns / weight
            # Rows per mean row: a step may take longer because more drafts were found.
            rows = (num_decodes + num_drafts) * weight / (self.decodes + self.drafts)
            high, low = _OUTLIER * mean * max(1.0, rows), mean * min(1.0, rows) / _OUTLIER
            if low <= ns <= high:
                self._outliers = 0
            else:
                self._outliers += 1
                if ns < low or self._outliers > _MOST_OUTLIERS:
                    # Nothing makes a step too short: the mean was wrong. Or it is no longer right.
                    self._outliers = 0
                    self.weight = weight = self.decodes = self.drafts = self.ns = 0.0
                else:
                    ns = high
        keep = _DECAY
        gap = now - self._seen_at - 1
        self._seen_at = now
        if gap > 0 and weight > _LEAST:
            keep *= max(_LEAST / weight, _FADE**gap)
        self.weight = keep * weight + 1
        self.decodes = keep * self.decodes + num_decodes
        self.drafts = keep * self.drafts + num_drafts
        self.ns = keep * self.ns + ns


class DraftCosts:
    """What drafts add to a step, relative to a step without any, at each batch size.

    Cells by batch-size bucket and number of drafts hold mean nanoseconds: drafting, further rows of the target, and
    what a change of shape costs are all in them, with no model of the machine. Both sides of a comparison are measured
    means of the same bucket, so that growing contexts cost no more than a new measurement of each. Steps that also
    compute prompts must not be added.

    A number of drafts that was not measured, between two that were, costs what the line between them says. A bucket
    that lacks a measurement takes the relative cost of the nearest one that has it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._cells: dict[int, list[_Cell]] = {}

    def observe(self, bucket: int, max_drafts: int, num_decodes: int, num_drafts: int, ns: int, now: int) -> None:
        """Add a step of `num_decodes` decodes that computed `num_drafts` drafts, at most `max_drafts` for each."""
        cells = self._cells.get(bucket)
        if cells is None:
            cells = self._cells[bucket] = [_Cell() for _ in range(self._most + 1)]
        cells[max_drafts].add(num_decodes, num_drafts, ns, now)

    def has(self, bucket: int, max_drafts: int) -> bool:
        """Whether this bucket itself has measured steps with so many drafts."""
        cells = self._cells.get(bucket)
        return cells is not None and cells[max_drafts].weight >= _MEASURED

    def most_measured(self, bucket: int) -> int:
        """The most drafts that this bucket itself has measured; 0: none."""
        cells = self._cells.get(bucket, ())
        return max((k for k, cell in enumerate(cells) if cell.weight >= _MEASURED), default=0)

    def extra(self, bucket: int, max_drafts: int) -> tuple[float, float] | None:
        """The time that drafts add, as a share of a step without any, and the drafts per decode that it was measured
        with. None: not measured within two octaves."""
        own = self._between(bucket, max_drafts, _NEAR)
        if own is not None:
            return own
        for distance in range(1, _REACH + 1):
            # Larger batches first: theirs is the higher cost.
            for near in (bucket + distance, bucket - distance):
                if near in self._cells and (found := self._between(near, max_drafts, 0)) is not None:
                    return found
        return None

    def _between(self, bucket: int, max_drafts: int, reach: int) -> tuple[float, float] | None:
        """As `_own_extra`; without a measurement of so many, between the nearest fewer and more."""
        own = self._own_extra(bucket, max_drafts, reach)
        if own is not None or bucket not in self._cells:
            return own
        more = ((k, self._own_extra(bucket, k, reach)) for k in range(max_drafts + 1, self._most + 1))
        high, above = next(((k, found) for k, found in more if found is not None), (0, None))
        if above is None:
            return None
        fewer = ((k, self._own_extra(bucket, k, reach)) for k in range(max_drafts - 1, 0, -1))
        low, below = next(((k, found) for k, found in fewer if found is not None), (0, (0.0, 0.0)))
        share = (max_drafts - low) / (high - low)
        return below[0] + share * (above[0] - below[0]), below[1] + share * (above[1] - below[1])

    def _own_extra(self, bucket: int, max_drafts: int, reach: int) -> tuple[float, float] | None:
        cells = self._cells.get(bucket)
        if cells is None:
            return None
        cell = cells[max_drafts]
        if cell.weight < _MEASURED:
            return None
        plain = self._plain(bucket, reach)
        if plain is None:
            return None
        growth = (cell.decodes / cell.weight) / (plain.decodes / plain.weight) - 1
        plain_ns = plain.ns / plain.weight * (1 + _ELASTICITY * growth)
        return max(0.0, cell.ns / cell.weight / plain_ns - 1), cell.drafts / cell.decodes

    def _plain(self, bucket: int, reach: int) -> _Cell | None:
        """The nearest measured steps without drafts, at most `reach` buckets away."""
        for distance in range(reach + 1):
            for near in (bucket + distance, bucket - distance):
                if near in self._cells and self._cells[near][0].weight >= _MEASURED:
                    return self._cells[near][0]
        return None
