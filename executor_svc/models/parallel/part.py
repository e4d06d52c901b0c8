"""A rank's part of a tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Rows or columns of a weight [rows, columns], or of a bias [rows]."""

    ranges: tuple[range, ...]
    """Ascending."""
    of_columns: bool
    total: int
    """Rows, or columns, of the whole."""
    axis: int = 0
    """The dimension of rows, in a tensor whose other ones are 1."""

    @property
    def count(self) -> int:
        return sum(map(len, self.ranges))

    def shape_of(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of a tensor."""
        rows, *columns = whole
        return (rows, self.count) if self.of_columns else (self.count, *columns)
